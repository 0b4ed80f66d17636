//! What Python calls, as a table: functions and methods that are one call of a crate below.
//!
//! Each crosses as a value (`value.rs`), and `?` in the call raises. The interpreter is released meanwhile, but for what is
//! `quick`, whose call takes less than that. Python's side of the table, with the words, is `_native.pyi`.

/// `fn name(arguments) -> answer = call;`, and `quick fn`. `add_functions` puts all into the module.
macro_rules! functions {
    (@ [$($known:ident)*] $(#[$about:meta])* fn $name:ident($($given:tt)*) -> $answer:ty = $call:expr; $($more:tt)*) => {
        #[pyo3::pyfunction]
        $(#[$about])*
        fn $name(py: pyo3::Python<'_>, $($given)*) -> $crate::errors::Answer<$answer> {
            py.detach(move || Ok($crate::value::Value($call)))
        }
        $crate::functions::functions! { @ [$($known)* $name] $($more)* }
    };
    (@ [$($known:ident)*] $(#[$about:meta])* quick fn $name:ident($($given:tt)*) -> $answer:ty = $call:expr; $($more:tt)*) => {
        #[pyo3::pyfunction]
        $(#[$about])*
        fn $name($($given)*) -> $crate::errors::Answer<$answer> {
            Ok($crate::value::Value($call))
        }
        $crate::functions::functions! { @ [$($known)* $name] $($more)* }
    };
    (@ [$($known:ident)*]) => {
        pub(crate) fn add_functions(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
            use pyo3::types::PyModuleMethods as _;
            $(module.add_function(pyo3::wrap_pyfunction!($known, module)?)?;)*
            Ok(())
        }
    };
    ($($all:tt)*) => { $crate::functions::functions! { @ [] $($all)* } };
}

/// The same for the methods of a class, with `self` first: also `make fn`, which makes one, and `waiting fn name(self,
/// stop; arguments)`, which a signal ends. What is in braces stays as it is written.
macro_rules! methods {
    (@ $class:ident [$($known:tt)*] $(#[$about:meta])* make fn $name:ident($($given:tt)*) = $call:expr; $($more:tt)*) => {
        $crate::functions::methods! { @ $class [$($known)*
            $(#[$about])*
            fn $name(py: pyo3::Python<'_>, $($given)*) -> $crate::errors::Result<Self> { py.detach(move || Ok($call)) }
        ] $($more)* }
    };
    (@ $class:ident [$($known:tt)*] $(#[$about:meta])* fn $name:ident($this:ident $(, $($given:tt)*)?) -> Self = $call:expr; $($more:tt)*) => {
        $crate::functions::methods! { @ $class [$($known)*
            $(#[$about])*
            fn $name(&$this, py: pyo3::Python<'_>, $($($given)*)?) -> $crate::errors::Result<Self> { py.detach(move || Ok($call)) }
        ] $($more)* }
    };
    (@ $class:ident [$($known:tt)*] $(#[$about:meta])* fn $name:ident($this:ident $(, $($given:tt)*)?) -> $answer:ty = $call:expr; $($more:tt)*) => {
        $crate::functions::methods! { @ $class [$($known)*
            $(#[$about])*
            fn $name(&$this, py: pyo3::Python<'_>, $($($given)*)?) -> $crate::errors::Answer<$answer> {
                py.detach(move || Ok($crate::value::Value($call)))
            }
        ] $($more)* }
    };
    (@ $class:ident [$($known:tt)*] $(#[$about:meta])* quick fn $name:ident($this:ident $(, $($given:tt)*)?) -> $answer:ty = $call:expr; $($more:tt)*) => {
        $crate::functions::methods! { @ $class [$($known)*
            $(#[$about])*
            fn $name(&$this, $($($given)*)?) -> $crate::errors::Answer<$answer> { Ok($crate::value::Value($call)) }
        ] $($more)* }
    };
    (@ $class:ident [$($known:tt)*] $(#[$about:meta])* waiting fn $name:ident($this:ident, $stop:ident $(; $($given:tt)*)?) -> $answer:ty = $call:expr; $($more:tt)*) => {
        $crate::functions::methods! { @ $class [$($known)*
            $(#[$about])*
            fn $name(&$this, py: pyo3::Python<'_>, $($($given)*)?) -> $crate::errors::Answer<$answer> {
                $crate::signals::waiting(py, |$stop| $call).map($crate::value::Value)
            }
        ] $($more)* }
    };
    (@ $class:ident [$($known:tt)*] { $($written:tt)* } $($more:tt)*) => {
        $crate::functions::methods! { @ $class [$($known)* $($written)*] $($more)* }
    };
    (@ $class:ident [$($known:tt)*]) => {
        #[pyo3::pymethods]
        impl $class { $($known)* }
    };
    (impl $class:ident { $($all:tt)* }) => { $crate::functions::methods! { @ $class [] $($all)* } };
}

pub(crate) use {functions, methods};
