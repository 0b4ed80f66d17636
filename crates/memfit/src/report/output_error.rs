//! How far an approximate plan of inference is off in what it returns, in units that a person can judge.
//!
//! Responsible for the shape of the host's answer, for the bound, and for the words. The bound is a part of the length of
//! what is returned. Nothing is said of accuracy on a task.

use memfit_engine::plan::counted;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::words::percent;

/// Most that outputs may be off by, as a part of their length, unless another bound is given.
const MOST_OF_OUTPUTS: f64 = 0.05;

/// What approximate outputs are beside the unplanned ones. Lengths are Euclidean, over all that is returned.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct OutputError {
    /// Length of the difference over the length of the unplanned outputs; absent when it is not a number.
    pub(crate) error: Option<f64>,
    /// Cosine of the angle between the two; absent when it is not a number.
    pub(crate) cosine: Option<f64>,
    /// Rows of the last dimension, where one tensor of two or three dimensions is returned: of logits, predictions.
    pub(crate) rows: u64,
    /// How many of them have their largest number in another place.
    pub(crate) other_choices: u64,
    /// Numbers that are finite unplanned, and not planned.
    pub(crate) not_finite: u64,
    /// The bound, as a part of the length.
    #[serde(default = "most_of_outputs")]
    pub(crate) max_error: f64,
}

const fn most_of_outputs() -> f64 {
    MOST_OF_OUTPUTS
}

impl OutputError {
    /// Are outputs within the bound? NaN never is.
    pub(crate) fn holds(&self) -> bool {
        self.not_finite == 0 && self.error.is_some_and(|error| error <= self.max_error)
    }

    /// What they are, in words.
    pub(crate) fn words(&self) -> String {
        let Some(error) = self.error else {
            return "NOT A NUMBER".to_owned();
        };
        let cosine = self.cosine.map(|cosine| format!(", cosine {cosine:.5}"));
        let broken =
            (self.not_finite > 0).then(|| format!("; {} NUMBERS NOT FINITE", self.not_finite));
        let off = format!(
            "off by {} of their length; at most {} is allowed",
            percent(error),
            percent(self.max_error)
        );
        [Some(off), cosine, broken].into_iter().flatten().collect()
    }

    /// In how many rows another number is the largest, in words; `None` where there are no rows.
    pub(crate) fn choice_words(&self) -> Option<String> {
        (self.rows > 0).then(|| {
            format!(
                "another entry is the largest in {} of {}",
                self.other_choices,
                counted(self.rows, "row")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs() -> OutputError {
        OutputError {
            error: Some(0.0217),
            cosine: Some(0.99977),
            rows: 128,
            other_choices: 3,
            not_finite: 0,
            max_error: MOST_OF_OUTPUTS,
        }
    }

    #[test]
    fn it_is_told_in_parts_of_a_length_and_in_choices() {
        insta::assert_snapshot!(outputs().words(), @"off by 2.2 % of their length; at most 5.0 % is allowed, cosine 0.99977");
        insta::assert_snapshot!(outputs().choice_words().unwrap(), @"another entry is the largest in 3 of 128 rows");
        assert!(outputs().holds());
        let image = OutputError {
            rows: 0,
            ..outputs()
        };
        assert_eq!(image.choice_words(), None);
    }

    #[test]
    fn more_than_the_bound_and_what_is_not_a_number_do_not_hold() {
        let cases = [
            (Some(0.06), 0, MOST_OF_OUTPUTS),
            (Some(0.0217), 0, 0.01),
            (Some(0.001), 1, MOST_OF_OUTPUTS),
            (Some(f64::NAN), 0, MOST_OF_OUTPUTS),
            (None, 0, MOST_OF_OUTPUTS),
        ];
        for (error, not_finite, max_error) in cases {
            let case = OutputError {
                error,
                not_finite,
                max_error,
                ..outputs()
            };
            assert!(!case.holds(), "{case:?}");
        }
    }
}
