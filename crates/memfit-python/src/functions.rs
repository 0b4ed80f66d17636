//! Functions of Python that are one call of a crate below.

/// `fn name(arguments) -> answer = call;`: the answer crosses as a value, and `?` in the call raises. The interpreter is
/// released meanwhile, but for a `quick fn`, whose call takes less than that. `add_functions` puts all into the module.
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

pub(crate) use functions;
