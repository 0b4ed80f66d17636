//! What Python calls, as tables: functions and methods that are one call of a crate below.
//!
//! Each line begins with the way in which its call crosses: a module here. `?` in a call raises. Python's side of the
//! tables, with the words, is `_native.pyi`.

use pyo3::Python;

/// Calls whose answers cross as values. The interpreter is released meanwhile.
pub(crate) mod free {
    use crate::errors::Result;
    pub(crate) use crate::value::Answer;

    pub(crate) fn answer<T: Send>(call: impl FnOnce() -> Result<T> + Send) -> Answer<T> {
        super::released(call).map(crate::value::Value)
    }
}

/// The same for calls that take less time than it takes to release the interpreter.
pub(crate) mod quick {
    use crate::errors::Result;
    pub(crate) use crate::value::Answer;

    pub(crate) fn answer<T>(call: impl FnOnce() -> Result<T>) -> Answer<T> {
        call().map(crate::value::Value)
    }
}

/// Calls whose answers are objects for Python already. The interpreter is released meanwhile.
pub(crate) mod object {
    pub(crate) use super::released as answer;
    pub(crate) use crate::errors::Result as Answer;
}

/// Does something without the interpreter.
pub(crate) fn released<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    Python::attach(|py| py.detach(work))
}

/// `way fn name(arguments) -> answer = call;`. `add_functions` puts all into the module.
macro_rules! functions {
    ($($(#[$about:meta])* $way:ident fn $name:ident($($given:tt)*) -> $answer:ty = $call:expr;)*) => {
        $(
            #[pyo3::pyfunction]
            $(#[$about])*
            fn $name($($given)*) -> $crate::functions::$way::Answer<$answer> {
                $crate::functions::$way::answer(move || Ok($call))
            }
        )*

        pub(crate) fn add_functions(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
            use pyo3::types::PyModuleMethods as _;
            $(module.add_function(pyo3::wrap_pyfunction!($name, module)?)?;)*
            Ok(())
        }
    };
}

/// The same for the methods of a class.
macro_rules! methods {
    (impl $class:ident {
        $($(#[$about:meta])* $way:ident fn $name:ident($($given:tt)*) -> $answer:ty = $call:expr;)*
    }) => {
        #[pyo3::pymethods]
        impl $class {$(
            $(#[$about])*
            fn $name($($given)*) -> $crate::functions::$way::Answer<$answer> {
                $crate::functions::$way::answer(move || Ok($call))
            }
        )*}
    };
}

pub(crate) use {functions, methods};
