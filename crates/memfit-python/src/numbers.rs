//! Numbers in fewer bits, and updates of an optimizer whose state is in 8, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding.

use std::num::NonZeroUsize;

use memfit_memory::forms::Form;
use memfit_memory::moments::{self, Adam, Moment, Momentum};
use memfit_memory::narrow;
use pyo3::intern;
use pyo3::prelude::*;

use crate::functions::functions;
use crate::lent::{Read, Written};

/// What an update is made of, from a dictionary: the rule, and in its `seed` the form of the numbers.
struct Rule<R>(R, Form);

/// Reads the fields of a rule by their names.
macro_rules! read_rules {
    ($($rule:ident { $($field:ident),+ })+) => {$(
        impl FromPyObject<'_, '_> for Rule<$rule> {
            type Error = PyErr;

            fn extract(rule: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
                let py = rule.py();
                let seed: Option<u32> = rule.get_item(intern!(py, "seed"))?.extract()?;
                let read = $rule {
                    $($field: rule.get_item(intern!(py, stringify!($field)))?.extract()?),+
                };
                Ok(Self(read, seed.map_or(Form::Wide, Form::Half)))
            }
        }
    )+};
}

read_rules! {
    Adam {
        direction, penalty, decay, first_added, second_stays, second_added, step, root_correction,
        epsilon
    }
    Momentum { direction, penalty, stays, added, nesterov, step }
}

functions! {
    /// Writes the 32-bit numbers at an address in 8 bits to another.
    fn shrink_numbers(wide: Read, mut narrow: Written, threads: NonZeroUsize) -> () =
        narrow::shrink(&wide, narrow.0.as_mut(), threads)?;

    /// Writes the numbers of 8 bits at an address in 32 to another.
    fn expand_numbers(narrow: Read, mut wide: Written, threads: NonZeroUsize) -> () =
        narrow::expand(&narrow, wide.0.as_mut(), threads)?;

    /// Writes the moment at an address in 8 bits to another.
    fn shrink_moment(is_second: bool, wide: Read, mut held: Written) -> () =
        moments::shrink(Moment::of(is_second), &wide, held.0.as_mut())?;

    /// Writes the moment of 8 bits at an address in 32 to another.
    fn expand_moment(is_second: bool, held: Read, mut wide: Written) -> () =
        moments::expand(Moment::of(is_second), &held, wide.0.as_mut())?;

    /// Updates the parameter at an address by Adam; `lower` are the lower halves of one in `bfloat16`, where they are kept.
    #[expect(clippy::too_many_arguments, reason = "as many tensors")]
    #[pyo3(signature = (rule, parameter, gradient, first, second, threads, lower=None))]
    fn update_by_adam(
        rule: Rule<Adam>, mut parameter: Written, gradient: Read, mut first: Written,
        mut second: Written, threads: NonZeroUsize, mut lower: Option<Written>
    ) -> () = {
        let (Rule(rule, form), lower) = (rule, lower.as_mut().map(|lower| lower.0.as_mut()));
        let moments = [first.0.as_mut(), second.0.as_mut()];
        let parameter = parameter.0.as_mut();
        moments::update_by_adam(rule, form, parameter, lower, &gradient, moments, threads)?;
    };

    /// Updates the parameter at an address by gradient descent with momentum; as [`update_by_adam`].
    #[pyo3(signature = (rule, parameter, gradient, held, threads, lower=None))]
    fn update_by_momentum(
        rule: Rule<Momentum>, mut parameter: Written, gradient: Read, mut held: Written,
        threads: NonZeroUsize, mut lower: Option<Written>
    ) -> () = {
        let (Rule(rule, form), lower) = (rule, lower.as_mut().map(|lower| lower.0.as_mut()));
        let (parameter, held) = (parameter.0.as_mut(), held.0.as_mut());
        moments::update_by_momentum(rule, form, parameter, lower, &gradient, held, threads)?;
    };
}
