//! What is asked for when planning wants the step in other ways: which, and at how many batch sizes.
//!
//! Responsible for sparing captures at a second size that no plan would look at. Not responsible for which ways are worth
//! one at all (`ways.rs`).
//!
//! A second size tells how a step grows with its batch, which only pieces of the batch need. In training the batch is cut in
//! the step as it is captured or nowhere, and of the ways that promise the same it is cut in the last that is known at two
//! sizes (`ways::outcomes`).

use serde::Serialize;

use super::technique::micro_batch;
use super::{ActionKind, PlanRequest, ways};
use crate::trace::{Trace, Way};

/// A way that a capture is wanted of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Asked {
    /// The way.
    #[serde(flatten)]
    pub way: Way,
    /// At which batch sizes.
    #[serde(skip_serializing_if = "Sizes::are_both")]
    pub sizes: Sizes,
}

/// The batch sizes that a way is captured at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sizes {
    /// The step's own and another.
    #[default]
    Both,
    /// The step's own alone.
    One,
    /// Both, where none that is asked for after it with the same number is known at both.
    LastOf(u32),
}

impl Sizes {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    fn are_both(&self) -> bool {
        *self == Self::Both
    }
}

impl From<Way> for Asked {
    fn from(way: Way) -> Self {
        let sizes = Sizes::Both;
        Self { way, sizes }
    }
}

/// Ways that are wanted for the plan of a step, with the sizes that it would look at.
pub(super) fn asked(trace: &Trace, request: &PlanRequest, wanted: &[Way]) -> Vec<Asked> {
    let may_cut = micro_batch::may_cut(trace, request);
    let with_sizes = |way: &Way| Asked {
        way: way.clone(),
        sizes: sizes(trace, may_cut, way),
    };
    wanted.iter().map(with_sizes).collect()
}

fn sizes(trace: &Trace, may_cut: bool, way: &Way) -> Sizes {
    if !trace.meta.training || way.items.is_some() {
        return Sizes::Both;
    }
    match ways::narrowing(way) {
        _ if !may_cut => Sizes::One,
        Some(ActionKind::HalfParameters) => Sizes::LastOf(0),
        Some(_) => Sizes::Both, // kinds that are wanted one without the other
        None if ways::is_cast(way) => Sizes::LastOf(1),
        None if way.chunk.is_some() => Sizes::LastOf(2),
        None => Sizes::LastOf(3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Class;
    use crate::trace::{Autocast, Chunk, Coupling, CouplingKind, HalfParameters, OpIndex, sample};

    fn all() -> [Way; 6] {
        let chunk = Chunk::default();
        let cast = Way {
            autocast: Some(Autocast {
                dtype: "bfloat16".to_owned(),
                cache: false,
                keep: Vec::new(),
            }),
            ..Way::default()
        };
        [
            Way {
                undo_checkpoints: true,
                ..Way::default()
            },
            Way::in_slices(chunk.clone()),
            cast.clone(),
            Way {
                chunk: Some(chunk),
                ..cast.clone()
            },
            Way {
                half_parameters: Some(HalfParameters { names: Vec::new() }),
                ..cast
            },
            Way {
                items: Some(2),
                ..Way::default()
            },
        ]
    }

    fn sizes_of(trace: &Trace) -> Vec<Sizes> {
        let request = PlanRequest {
            allow: Class::Approximate,
            ..PlanRequest::default()
        };
        let asked = asked(trace, &request, &all()).into_iter();
        asked.map(|it| it.sizes).collect()
    }

    #[test]
    fn ways_of_one_promise_share_what_is_known_of_another_size() {
        let mut trace = sample::batched_chain(8);
        trace.meta.second_batch = 4;
        trace.meta.loss_reduction = "mean".to_owned();
        trace.couplings = Some(Vec::new());
        let shared = [3, 2, 1, 1, 0].map(Sizes::LastOf).into_iter();
        let expected: Vec<_> = shared.chain([Sizes::Both]).collect();
        assert_eq!(sizes_of(&trace), expected);
        // Where the batch is not cut anyway, one size is enough, but for what asks for another.
        trace.couplings = Some(vec![Coupling {
            op: OpIndex(0),
            kind: CouplingKind::Statistic,
        }]);
        let mut expected = vec![Sizes::One; 5];
        expected.push(Sizes::Both);
        assert_eq!(sizes_of(&trace), expected);
    }

    #[test]
    fn inference_is_cut_in_any_way() {
        assert_eq!(sizes_of(&sample::inference(8)), [Sizes::Both; 6]);
    }

    #[test]
    fn what_asks_for_both_says_no_more_than_the_way() {
        let [_, _, way, ..] = all();
        let json = |asked: &Asked| serde_json::to_value(asked).unwrap();
        let plain = serde_json::to_value(&way).unwrap();
        let mut asked = Asked::from(way);
        assert_eq!(json(&asked), plain);
        asked.sizes = Sizes::One;
        assert_eq!(json(&asked)["sizes"], "one");
        asked.sizes = Sizes::LastOf(1);
        assert_eq!(json(&asked)["sizes"]["last_of"], 1);
    }
}
