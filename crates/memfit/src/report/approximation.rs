//! How far an approximate plan changes gradients and updates, in units that a person can judge.
//!
//! Responsible for the shape of the host's answer, for the bound, and for what keeps it. The yardstick is the noise of the
//! batch: what the same gradients change by when other examples make up the batch. A change that is small beside it is
//! small beside what training lives with anyway; nothing is said of accuracy after training.

use memfit_engine::plan::counted;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::comparison::Comparison;
use super::words::percent;

/// Most that a plan may change gradients by, as a part of the batch's noise, unless another bound is given.
pub(crate) const MOST_OF_NOISE: f64 = 0.1;
/// Most as a part of the gradients themselves, where the noise is not known.
const MOST_OF_GRADIENTS: f64 = 0.05;
/// Most as a part of the gradients themselves, however much noise there is: beyond it they are others.
const MOST_EVER: f64 = 0.5;
/// Most that parameters may be off by after some steps, as a part of how far they moved.
const MOST_OF_MOVE: f64 = 0.1;

/// Most steps that may be skipped once the scale of the loss fits, as a part of all.
const MOST_SKIPPED: f64 = 0.05;

/// What approximate gradients are beside the unplanned ones. Lengths are Euclidean, over all parameters.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct Approximation {
    /// Length of the difference over the length of the unplanned gradients; absent when it is not a number.
    pub(crate) gradient_error: Option<f64>,
    /// Cosine of the angle between the two; absent when it is not a number.
    pub(crate) cosine: Option<f64>,
    /// The parameter whose gradient is farthest off, among those with a thousandth of the whole length or more.
    pub(crate) worst_parameter: String,
    /// How far, as a part of the length of its own gradient.
    pub(crate) worst_error: Option<f64>,
    /// What other examples would change the gradients by, as a part of their length: half the difference of the
    /// gradients of the batch's halves. Absent where the batch has no halves.
    pub(crate) batch_noise: Option<f64>,
    /// Numbers in gradients that are finite unplanned, and not planned.
    pub(crate) not_finite: u64,
    /// Numbers of parameters after some steps: length of the difference over the length of how far the unplanned ones
    /// moved. Absent where updates read nothing that was rounded, and when it is not a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) update_error: Option<f64>,
    /// How far parameters are off by chance alone after these steps, as a part of how far the unplanned ones moved: two
    /// planned runs that round by other draws differ by the root of two times that. Absent where nothing is rounded at
    /// random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rounding_spread: Option<f64>,
    /// Parameters that this leaves out, as the loss does not depend on them: their gradients are rounding alone, which
    /// the optimizer makes full steps of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) idle_parameters: Vec<String>,
    /// After how many steps that was; none where updates were not looked at.
    #[serde(default)]
    pub(crate) update_steps: u64,
    /// Steps with a scaled loss that were looked at once the scale fitted; none where it is not scaled.
    #[serde(default)]
    pub(crate) scaled_steps: u64,
    /// How many of them updated nothing, as a gradient was not finite.
    #[serde(default)]
    pub(crate) skipped_steps: u64,
    /// The loss after some steps; absent where the batch's examples cannot be drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) later_loss: Option<LaterLoss>,
    /// The bound, as a part of the batch's noise.
    #[serde(default = "most_of_noise")]
    pub(crate) max_error: f64,
}

/// The loss after steps on examples drawn from the batch, beside what other draws give.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct LaterLoss {
    /// After how many steps.
    pub(crate) steps: u64,
    /// Unplanned; not a number where it is absent.
    pub(crate) unplanned: Option<f64>,
    /// Planned, with the same examples; likewise.
    pub(crate) planned: Option<f64>,
    /// The least and the most, unplanned, of these and some other draws; likewise.
    pub(crate) lowest: Option<f64>,
    pub(crate) highest: Option<f64>,
}

const fn most_of_noise() -> f64 {
    MOST_OF_NOISE
}

impl Approximation {
    /// The change as a part of the batch's noise, where that is known.
    pub(crate) fn part_of_noise(&self) -> Option<f64> {
        let noise = self.batch_noise.filter(|&noise| noise > 0.0)?;
        Some(self.gradient_error? / noise)
    }

    /// Are gradients and updates within their bounds? NaN never is.
    pub(crate) fn holds(&self) -> bool {
        let updates_are =
            self.update_steps == 0 || self.update_error.is_some_and(|error| error <= MOST_OF_MOVE);
        let is_lost = |it: LaterLoss| it.unplanned.is_some() && it.planned.is_none();
        updates_are
            && self.holds_but_for_updates()
            && !self.skips_too_often()
            && !self.later_loss.is_some_and(is_lost)
    }

    /// Does the loss scale overflow again and again?
    #[expect(clippy::cast_precision_loss, reason = "a handful of steps")]
    fn skips_too_often(&self) -> bool {
        self.skipped_steps as f64 > MOST_SKIPPED * self.scaled_steps as f64
    }

    /// What became of steps with a scaled loss, in words; `None` where it is not scaled.
    pub(crate) fn scale_words(&self) -> Option<String> {
        (self.scaled_steps > 0).then(|| {
            format!(
                "{} of {} skipped, as gradients overflowed; at most {} may be",
                self.skipped_steps,
                counted(self.scaled_steps, "step"),
                percent(MOST_SKIPPED)
            )
        })
    }

    /// Are gradients?
    pub(crate) fn holds_but_for_updates(&self) -> bool {
        let is_near = match (self.part_of_noise(), self.gradient_error) {
            (Some(part), _) => part <= self.max_error,
            (None, Some(error)) => error <= MOST_OF_GRADIENTS,
            (None, None) => false,
        };
        let is_another = self.gradient_error.is_none_or(|error| error > MOST_EVER);
        is_near && !is_another && self.not_finite == 0
    }

    /// Is a loss still that of the step?
    pub(crate) fn is_its_loss(loss: Comparison) -> bool {
        loss.max_relative_error
            .is_some_and(|error| error <= MOST_EVER)
    }

    /// What a loss is beside the unplanned one, in words.
    pub(crate) fn loss_words(loss: Comparison) -> String {
        let error = loss.max_relative_error.filter(|error| error.is_finite());
        error.map_or_else(
            || "NOT A NUMBER".to_owned(),
            |error| format!("off by {} of its value", percent(error)),
        )
    }

    /// What the gradients are, in words.
    pub(crate) fn words(&self) -> String {
        let Some(error) = self.gradient_error else {
            return "NOT A NUMBER".to_owned();
        };
        let cosine = self.cosine.map(|cosine| format!(", cosine {cosine:.5}"));
        let named = self
            .worst_error
            .filter(|_| !self.worst_parameter.is_empty());
        let worst =
            named.map(|worst| format!("; most `{}`, by {}", self.worst_parameter, percent(worst)));
        let broken =
            (self.not_finite > 0).then(|| format!("; {} NUMBERS NOT FINITE", self.not_finite));
        [
            Some(format!("off by {} of their length", percent(error))),
            cosine,
            worst,
            broken,
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// What updates are, in words; `None` where they were not looked at.
    pub(crate) fn update_words(&self) -> Option<String> {
        (self.update_steps > 0).then_some(())?;
        let Some(error) = self.update_error else {
            return Some("NOT A NUMBER".to_owned());
        };
        let by_chance = self.rounding_spread.map_or_else(String::new, |spread| {
            format!(
                ", and by {} by chance alone, as updates are rounded at random",
                percent(spread)
            )
        });
        Some(format!(
            "after {} parameters are off by {} of how far they moved{by_chance}; at most {} is allowed{}",
            counted(self.update_steps, "step"),
            percent(error),
            percent(MOST_OF_MOVE),
            self.idle_words()
        ))
    }

    /// Which parameters are left out of updates, and why; empty where none are.
    fn idle_words(&self) -> String {
        match self.idle_parameters.as_slice() {
            [] => String::new(),
            [one] => format!(
                "; `{one}` is left out: the loss does not depend on it, and its gradient is rounding alone"
            ),
            [first, ..] => format!(
                "; {} parameters, `{first}` first, are left out: the loss does not depend on them, and their gradients \
                 are rounding alone",
                self.idle_parameters.len()
            ),
        }
    }

    /// What the loss is after some steps, in words; `None` where it was not looked at.
    pub(crate) fn later_words(&self) -> Option<String> {
        let later = self.later_loss?;
        let (Some(unplanned), Some(planned)) = (later.unplanned, later.planned) else {
            return Some(format!(
                "after {} the loss is NOT A NUMBER",
                counted(later.steps, "step")
            ));
        };
        let others = later.lowest.zip(later.highest);
        let others = others.map_or_else(String::new, |(lowest, highest)| {
            format!("; with other draws of the batch's examples {lowest:.4} to {highest:.4}")
        });
        Some(format!(
            "after {} the loss is {planned:.4}, unplanned {unplanned:.4}{others}",
            counted(later.steps, "step")
        ))
    }

    /// What that is beside the batch's noise, in words.
    pub(crate) fn yardstick(&self) -> String {
        match (self.part_of_noise(), self.batch_noise) {
            (Some(part), Some(noise)) => format!(
                "other examples would change them by {}; this is {} of that, and at most {} is allowed",
                percent(noise),
                percent(part),
                percent(self.max_error)
            ),
            _ => format!(
                "what other examples would change is not known: at most {} of their length is allowed",
                percent(MOST_OF_GRADIENTS)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn approximation() -> Approximation {
        Approximation {
            gradient_error: Some(0.0094),
            cosine: Some(0.99996),
            worst_parameter: "h.3.mlp.weight".to_owned(),
            worst_error: Some(0.021),
            batch_noise: Some(0.78),
            not_finite: 0,
            update_error: None,
            idle_parameters: Vec::new(),
            rounding_spread: None,
            update_steps: 0,
            scaled_steps: 0,
            skipped_steps: 0,
            later_loss: None,
            max_error: MOST_OF_NOISE,
        }
    }

    #[test]
    fn it_is_told_in_parts_of_what_other_examples_would_change() {
        let said = approximation();
        insta::assert_snapshot!(said.words(), @"off by 0.94 % of their length, cosine 0.99996; most `h.3.mlp.weight`, by 2.1 %");
        insta::assert_snapshot!(said.yardstick(), @"other examples would change them by 78 %; this is 1.2 % of that, and at most 10 % is allowed");
        assert!(said.holds());
    }

    #[test]
    fn a_loss_is_off_by_a_part_of_its_value_and_by_half_of_it_it_is_another() {
        let off = |max_relative_error| Comparison {
            agreement: crate::report::comparison::Agreement::Different,
            max_relative_error,
        };
        let said = |error| Approximation::loss_words(off(error));
        assert_eq!(said(Some(1.5e-6)), "off by less than 0.01 % of its value");
        assert_eq!(said(Some(0.0123)), "off by 1.2 % of its value");
        assert_eq!(said(Some(f64::INFINITY)), "NOT A NUMBER");
        let kept = |error| Approximation::is_its_loss(off(error));
        let cases = [Some(0.4), Some(0.6), Some(f64::NAN), None];
        assert_eq!(cases.map(kept), [true, false, false, false]);
    }

    #[test]
    fn more_than_the_bound_and_what_is_not_a_number_do_not_hold() {
        let cases = [
            Approximation {
                gradient_error: Some(0.08),
                ..approximation()
            },
            Approximation {
                max_error: 0.01,
                ..approximation()
            },
            Approximation {
                not_finite: 1,
                ..approximation()
            },
            Approximation {
                gradient_error: None,
                ..approximation()
            },
            Approximation {
                gradient_error: Some(f64::NAN),
                ..approximation()
            },
            Approximation {
                gradient_error: Some(0.06),
                batch_noise: None,
                ..approximation()
            },
            Approximation {
                scaled_steps: 10,
                skipped_steps: 2,
                ..approximation()
            },
            // Gradients twice as long, in a batch of much noise.
            Approximation {
                gradient_error: Some(1.0),
                batch_noise: Some(20.0),
                ..approximation()
            },
        ];
        for case in cases {
            assert!(!case.holds(), "{case:?}");
        }
        for (update_error, holds) in [(Some(0.004), true), (Some(0.2), false), (None, false)] {
            let case = Approximation {
                update_error,
                rounding_spread: None,
                update_steps: 5,
                ..approximation()
            };
            assert_eq!(case.holds(), holds);
            assert!(case.update_words().is_some());
        }
        let later = |planned| Approximation {
            later_loss: Some(LaterLoss {
                steps: 5,
                unplanned: Some(2.3456),
                planned,
                lowest: Some(2.3),
                highest: Some(2.41),
            }),
            ..approximation()
        };
        insta::assert_snapshot!(later(Some(2.3457)).later_words().unwrap(), @"after 5 steps the loss is 2.3457, unplanned 2.3456; with other draws of the batch's examples 2.3000 to 2.4100");
        assert!(later(Some(2.3457)).holds());
        assert!(!later(None).holds());
        let unknown = Approximation {
            batch_noise: None,
            ..approximation()
        };
        assert!(unknown.holds());
        assert!(unknown.yardstick().contains("is not known: at most 5.0 %"));
    }
}
