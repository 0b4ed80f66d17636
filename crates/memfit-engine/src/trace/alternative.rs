//! The same step captured in other ways.
//!
//! Responsible for finding them in a trace, for adding them to one, and for what an alternative must have in common with
//! its trace. Not responsible for what a way is (`way.rs`).
//!
//! Slices, autocast and parameters in 16 bits change which ops run, and autograd what stays, so their memory is not derived
//! from the plain trace: the step is captured once more in that way, and that trace is as good as any.

use super::{Alternative, Alternatives, Piece, Trace, TraceError, Way};

impl Trace {
    /// The trace without its alternatives.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            devices: self.devices.clone(),
            strings: self.strings.clone(),
            allocations: self.allocations.clone(),
            values: self.values.clone(),
            ops: self.ops.clone(),
            saved: self.saved.clone(),
            regions: self.regions.clone(),
            updates: self.updates.clone(),
            couplings: self.couplings.clone(),
            alternatives: None,
            pieces: self.pieces.clone(),
        }
    }

    /// The trace with these alternatives instead of its own.
    ///
    /// # Errors
    ///
    /// As [`Trace::check`].
    pub fn with_alternatives(&self, alternatives: Alternatives) -> Result<Self, TraceError> {
        let whole = Self {
            alternatives: Some(alternatives),
            ..self.alone()
        };
        whole.check()?;
        Ok(whole)
    }

    /// The step in a way, as captured; `None` where it was not.
    #[must_use]
    pub fn in_way(&self, way: &Way) -> Option<&Self> {
        if *way == Way::default() {
            return Some(self);
        }
        let mut steps = self.alternatives().iter();
        Some(&steps.find(|step| step.way == *way)?.trace)
    }

    /// The trace with the scratch of the step on fewer items, in the way that was asked for.
    ///
    /// # Errors
    ///
    /// That step is not known, or runs other ops on so many items.
    pub fn with_piece(&self, way: &Way, recorded: &Self) -> Result<Self, String> {
        let whole_way = Way {
            items: None,
            ..way.clone()
        };
        let mut made = self.clone();
        let is_plain = whole_way == Way::default();
        let steps = made.alternatives.iter_mut().flat_map(|it| &mut it.steps);
        let own = steps.filter(|step| step.way == whole_way);
        let own = own.map(|step| &mut step.trace).next();
        let Some(own) = (if is_plain { Some(&mut made) } else { own }) else {
            return Err("the step was not captured in that way".to_owned());
        };
        let names = |trace: &'_ Self| -> Vec<String> {
            let ops = trace.ops.iter();
            ops.map(|op| trace.string(op.name).to_owned()).collect()
        };
        if names(own) != names(recorded) {
            return Err(format!(
                "it runs other ops on {} items",
                recorded.meta.batch
            ));
        }
        own.pieces.push(Piece {
            items: recorded.meta.batch,
            workspace_bytes: recorded.ops.iter().map(|op| op.workspace_bytes).collect(),
        });
        Ok(made)
    }

    /// The alternatives captured; none where none was tried.
    #[must_use]
    pub fn alternatives(&self) -> &[Alternative] {
        self.alternatives
            .as_ref()
            .map_or(&[], |found| found.steps.as_slice())
    }

    /// Checks every alternative, and that it is one of this step.
    pub(super) fn check_alternatives(&self) -> Result<(), TraceError> {
        for (index, step) in self.alternatives().iter().enumerate() {
            let wrong = |rule| TraceError::Disorder {
                owner: format!("alternative {index}"),
                rule,
            };
            let (own, other) = (&self.meta, &step.trace.meta);
            if step.trace.alternatives.is_some() {
                return Err(wrong("an alternative has no alternatives"));
            }
            if (own.batch, own.training, &own.device_kind)
                != (other.batch, other.training, &other.device_kind)
            {
                return Err(wrong("an alternative is of the same step"));
            }
            if !step.way.is_valid() {
                return Err(wrong("what runs in slices runs in one at least"));
            }
            step.trace.check()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Bytes;
    use crate::trace::{Autocast, Chunk, LossChunk, sample};

    fn with(steps: Vec<Alternative>) -> Trace {
        let alternatives = Alternatives {
            steps,
            ..Alternatives::default()
        };
        Trace {
            alternatives: Some(alternatives),
            ..sample::chain()
        }
    }

    fn sliced(trace: Trace, slices: u64) -> Alternative {
        let loss = LossChunk {
            slices,
            weight: "head".to_owned(),
            rows: 4,
            classes: 8,
            logit_bytes: Bytes(128),
        };
        let chunk = Chunk {
            loss: Some(loss),
            ..Chunk::default()
        };
        Alternative {
            way: Way::in_slices(chunk),
            trace,
        }
    }

    fn cast(trace: Trace) -> Alternative {
        let autocast = Autocast {
            dtype: "bfloat16".to_owned(),
            cache: false,
            keep: Vec::new(),
        };
        let way = Way {
            autocast: Some(autocast),
            ..Way::default()
        };
        Alternative { way, trace }
    }

    #[test]
    fn an_alternative_is_a_valid_trace_of_the_same_step() {
        assert!(with(vec![sliced(sample::chain(), 2)]).check().is_ok());
        assert!(with(vec![cast(sample::chain())]).check().is_ok());
        let plain = Alternative {
            way: Way::default(),
            trace: sample::chain(),
        };
        let mut other_batch = sample::chain();
        other_batch.meta.batch += 1;
        let mut broken = sample::chain();
        broken.strings.clear();
        let nested = with(Vec::new());
        for wrong in [
            sliced(other_batch, 2),
            sliced(broken, 2),
            sliced(nested, 2),
            sliced(sample::chain(), 0),
            plain,
        ] {
            assert!(with(vec![wrong]).check().is_err());
        }
    }

    #[test]
    fn a_file_without_alternatives_is_read_and_one_with_them_comes_back_as_it_was() {
        let plain = serde_json::to_string(&sample::chain()).unwrap();
        assert!(!plain.contains("alternatives"));
        assert_eq!(
            serde_json::from_str::<Trace>(&plain).unwrap(),
            sample::chain()
        );
        let rich = with(vec![sliced(sample::chain(), 2), cast(sample::chain())]);
        let file = crate::file::encode(&rich);
        assert_eq!(crate::file::decode(&file).unwrap(), rich);
        assert_eq!(rich.alone(), sample::chain());
    }
}
