//! Traces from what a capture wrote: JSON, which is checked before anything is made of it.
//!
//! Responsible for the way from captures of a step to its trace. Not responsible for recording (the Python package) nor
//! for what is learnt from two batch sizes (`batch.rs`) and other ways (`alternative.rs`).

use super::{Alternative, Refusals, Trace, TraceError, Way};

/// Why what a capture wrote is no trace.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// It is not of a trace's shape.
    #[error("the trace is not valid: {0}")]
    Json(#[from] serde_json::Error),
    /// It contradicts itself.
    #[error("the trace is not valid: {0}")]
    Trace(#[from] TraceError),
    /// It is not of the same step.
    #[error("the step in another way is not valid: {0}")]
    Alternative(TraceError),
}

/// A step in another way as captured: which, its trace as JSON, and the trace at another batch size if there is one.
pub type CapturedWay = (Way, Vec<u8>, Option<Vec<u8>>);

impl Trace {
    /// The trace of a step from the JSON of its captures: one, another at another batch size, and the batch size wanted,
    /// as [`Trace::from_captures`] has them.
    ///
    /// # Errors
    ///
    /// A capture is not valid.
    pub fn from_json(
        first: &[u8],
        second: Option<&[u8]>,
        batch: u64,
    ) -> Result<Self, CaptureError> {
        let first = checked(first)?;
        let second = second.map(checked).transpose()?;
        Ok(Self::from_captures(first, second.as_ref(), batch))
    }

    /// The trace with the step in more ways than those that it has, at its own batch size, and why there are no others.
    ///
    /// # Errors
    ///
    /// A capture is not valid, or not of this step.
    pub fn with_captures(
        &self,
        captures: Vec<CapturedWay>,
        refusals: Refusals,
    ) -> Result<Self, CaptureError> {
        let steps = captures.into_iter().map(|(way, first, second)| {
            let trace = Self::from_json(&first, second.as_deref(), self.meta.batch)?;
            Ok(Alternative { way, trace })
        });
        let new = steps.collect::<Result<Vec<_>, CaptureError>>()?;
        let mut alternatives = self.alternatives.clone().unwrap_or_default();
        alternatives.steps.extend(new);
        alternatives.refusals.add(refusals);
        self.with_alternatives(alternatives)
            .map_err(CaptureError::Alternative)
    }

    /// The trace with what ops take on a captured piece of the batch, in the way that was asked for; as it is where the
    /// step runs other ops there.
    ///
    /// # Errors
    ///
    /// The capture is not valid.
    pub fn with_captured_piece(&self, way: &Way, piece: &[u8]) -> Result<Self, CaptureError> {
        let piece = checked(piece)?;
        Ok(self
            .with_piece(way, &piece)
            .unwrap_or_else(|_| self.clone()))
    }
}

fn checked(json: &[u8]) -> Result<Trace, CaptureError> {
    let trace: Trace = serde_json::from_slice(json)?;
    trace.check()?;
    Ok(trace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Autocast, sample};

    fn json(trace: &Trace) -> Vec<u8> {
        serde_json::to_vec(trace).unwrap()
    }

    fn cast() -> Way {
        let autocast = Autocast {
            dtype: "bfloat16".to_owned(),
            cache: false,
            keep: Vec::new(),
        };
        Way {
            autocast: Some(autocast),
            ..Way::default()
        }
    }

    fn on_items(way: Way, items: u64) -> Way {
        Way {
            items: Some(items),
            ..way
        }
    }

    #[test]
    fn captures_become_the_trace_that_their_values_become() {
        let (first, second) = (sample::batched_chain(4), sample::batched_chain(6));
        let alone = Trace::from_json(&json(&first), None, 0).unwrap();
        assert_eq!(alone, first);
        let both = Trace::from_json(&json(&first), Some(&json(&second)), 12).unwrap();
        assert_eq!(both.meta.batch, 12);
        assert_eq!(both, Trace::from_captures(first, Some(&second), 12));
    }

    #[test]
    fn what_is_no_trace_is_refused_with_the_reason() {
        let step = sample::chain();
        let mut broken = step.clone();
        broken.strings.clear();
        let broken = json(&broken);
        let said = |result: Result<Trace, CaptureError>| result.unwrap_err().to_string();
        let shape = said(Trace::from_json(b"{", None, 0));
        assert!(shape.starts_with("the trace is not valid: "), "{shape}");
        for refused in [
            Trace::from_json(&broken, None, 0),
            Trace::from_json(&json(&step), Some(&broken), 0),
            step.with_captures(vec![(cast(), broken.clone(), None)], Refusals::default()),
            step.with_captured_piece(&Way::default(), &broken),
        ] {
            let said = said(refused);
            assert!(said.starts_with("the trace is not valid: "), "{said}");
            assert!(said.contains("string 0 must be the empty string"), "{said}");
        }
    }

    #[test]
    fn captures_in_other_ways_are_those_of_the_step_at_its_batch_size() {
        let step = sample::batched_chain(4);
        let (first, second) = (sample::batched_chain(2), sample::batched_chain(3));
        let capture = (cast(), json(&first), Some(json(&second)));
        let refusals = Refusals {
            slices: "it has no loss".to_owned(),
            ..Refusals::default()
        };
        let whole = step.with_captures(vec![capture], refusals.clone()).unwrap();
        let alternatives = whole.alternatives.as_ref().unwrap();
        assert_eq!(alternatives.refusals, refusals);
        let captured = whole.in_way(&cast()).unwrap();
        assert_eq!(
            captured.op_names()[..3],
            ["aten.mm.default", "aten.gelu.default", "aten.sin.default"]
        );
        assert_eq!(
            *captured,
            Trace::from_captures(first.clone(), Some(&second), 4)
        );

        let other = vec![(cast(), json(&first), None)];
        let said = step.with_captures(other, Refusals::default()).unwrap_err();
        let said = said.to_string();
        assert!(
            said.starts_with("the step in another way is not valid: "),
            "{said}"
        );
    }

    #[test]
    fn a_piece_is_taken_where_its_ops_are_those_of_the_step() {
        let step = sample::batched_chain(4);
        let piece = sample::batched_chain(1);
        let taken = step.with_captured_piece(&on_items(Way::default(), 1), &json(&piece));
        assert_eq!(taken.unwrap().pieces.len(), 1);
        for (way, piece) in [(Way::default(), &sample::inference(1)), (cast(), &piece)] {
            let same = step.with_captured_piece(&on_items(way, 1), &json(piece));
            assert_eq!(same.unwrap(), step);
        }
    }
}
