//! Numbers in fewer bits, and updates of an optimizer whose state is in 8, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding.

use std::num::NonZeroUsize;

use memfit_memory::forms::Form;
use memfit_memory::moments::{self, Adam, Moment, Momentum};
use memfit_memory::narrow;
use serde::Deserialize;

use crate::functions::functions;
use crate::lent::{Read, Written};
use crate::value::Value;

/// What an update is made of, with the seed of what rounds numbers where they are narrow.
#[derive(Deserialize)]
struct Seeded<R> {
    #[serde(flatten)]
    rule: R,
    seed: Option<u32>,
}

impl<R> Seeded<R> {
    fn form(&self) -> Form {
        self.seed.map_or(Form::Wide, Form::Half)
    }
}

functions! {
    fn shrink_numbers(wide: Read, mut narrow: Written, threads: NonZeroUsize) -> () =
        narrow::shrink(&wide, narrow.0.as_mut(), threads)?;
    fn expand_numbers(narrow: Read, mut wide: Written, threads: NonZeroUsize) -> () =
        narrow::expand(&narrow, wide.0.as_mut(), threads)?;
    fn shrink_moment(is_second: bool, wide: Read, mut held: Written) -> () =
        moments::shrink(Moment::of(is_second), &wide, held.0.as_mut())?;
    fn expand_moment(is_second: bool, held: Read, mut wide: Written) -> () =
        moments::expand(Moment::of(is_second), &held, wide.0.as_mut())?;

    #[expect(clippy::too_many_arguments, reason = "as many tensors")]
    #[pyo3(signature = (rule, parameter, gradient, first, second, threads, lower=None))]
    fn update_by_adam(
        rule: Value<Seeded<Adam>>, mut parameter: Written, gradient: Read, mut first: Written,
        mut second: Written, threads: NonZeroUsize, mut lower: Option<Written>
    ) -> () = {
        let (parameter, lower) = (parameter.0.as_mut(), lower.as_mut().map(|lower| lower.0.as_mut()));
        let moments = [first.0.as_mut(), second.0.as_mut()];
        moments::update_by_adam(rule.rule, rule.form(), parameter, lower, &gradient, moments, threads)?;
    };

    #[pyo3(signature = (rule, parameter, gradient, held, threads, lower=None))]
    fn update_by_momentum(
        rule: Value<Seeded<Momentum>>, mut parameter: Written, gradient: Read, mut held: Written,
        threads: NonZeroUsize, mut lower: Option<Written>
    ) -> () = {
        let (parameter, lower) = (parameter.0.as_mut(), lower.as_mut().map(|lower| lower.0.as_mut()));
        let held = held.0.as_mut();
        moments::update_by_momentum(rule.rule, rule.form(), parameter, lower, &gradient, held, threads)?;
    };
}
