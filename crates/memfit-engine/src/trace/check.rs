//! The rules a trace must obey, checked once, when it enters the engine.
//!
//! Responsible for every index being in range and every interval being ordered, so that the rest of
//! the engine may index without asking. Not responsible for whether the trace is *true*.

use super::{AllocationId, OpIndex, Phase, Trace};
use crate::bytes::Bytes;

/// The first rule a trace breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// An index points past the end of its table.
    #[error("{what} {index} of {owner} is out of range: there are {limit}")]
    OutOfRange {
        /// What the index is (`value`, `string`, ...).
        what: &'static str,
        /// Its value.
        index: u64,
        /// Who holds it (`op 12`).
        owner: String,
        /// Size of the table.
        limit: usize,
    },
    /// Something is not in the order it must have.
    #[error("{owner}: {rule}")]
    Disorder {
        /// Who breaks it.
        owner: String,
        /// The rule.
        rule: &'static str,
    },
    /// All sizes together are beyond any memory.
    #[error("the step's sizes add up to {total} bytes, which no memory holds")]
    TooManyBytes {
        /// Their sum.
        total: u128,
    },
    /// A table is larger than an index can address.
    #[error("the trace holds {count} {what}, more than the {limit} memfit accepts")]
    TooLarge {
        /// Which table.
        what: &'static str,
        /// Its size.
        count: usize,
        /// The limit.
        limit: usize,
    },
}

/// More bytes in one step than any machine will have; sums below it cannot overflow.
const MAX_TOTAL_BYTES: u128 = 1 << 60;
/// No table may be longer: indices are 32 bits, and a step of this size is no step.
const MAX_ROWS: usize = 1 << 28;

impl Trace {
    /// Checks every rule the rest of the engine relies on.
    ///
    /// # Errors
    ///
    /// The first rule broken, naming the row.
    pub fn check(&self) -> Result<(), TraceError> {
        self.check_sizes()?;
        if self.strings.first().is_none_or(|first| !first.is_empty()) {
            return Err(disorder(
                "strings".into(),
                "string 0 must be the empty string",
            ));
        }
        self.check_allocations()?;
        self.check_fixed_parameters()?;
        self.check_returns()?;
        for (i, value) in self.values.iter().enumerate() {
            let owner = || format!("value {i}");
            in_range(
                "allocation",
                value.allocation.index(),
                owner,
                self.allocations.len(),
            )?;
            self.check_string(value.dtype, owner)?;
        }
        self.check_ops()?;
        self.check_saved()?;
        self.check_regions()?;
        self.check_updates()?;
        if self
            .pieces
            .iter()
            .any(|it| it.workspace_bytes.len() != self.ops.len())
        {
            return Err(TraceError::Disorder {
                owner: "a piece of the batch".to_owned(),
                rule: "each op has its scratch there",
            });
        }
        self.check_alternatives()
    }

    fn check_sizes(&self) -> Result<(), TraceError> {
        for (what, count) in [
            ("ops", self.ops.len()),
            ("values", self.values.len()),
            ("allocations", self.allocations.len()),
            ("saved tensors", self.saved.len()),
            ("strings", self.strings.len()),
        ] {
            if count > MAX_ROWS {
                return Err(TraceError::TooLarge {
                    what,
                    count,
                    limit: MAX_ROWS,
                });
            }
        }
        let total = self.total_bytes();
        if total > MAX_TOTAL_BYTES {
            Err(TraceError::TooManyBytes { total })
        } else {
            Ok(())
        }
    }

    /// Whether sums of this step's sizes stay within bounds.
    pub(super) fn is_addable(&self) -> bool {
        self.total_bytes() <= MAX_TOTAL_BYTES
    }

    fn total_bytes(&self) -> u128 {
        let sum =
            |bytes: &mut dyn Iterator<Item = Bytes>| bytes.map(|b| u128::from(b.0)).sum::<u128>();
        sum(&mut self.allocations.iter().map(|a| a.bytes))
            + sum(&mut self.ops.iter().map(|op| op.workspace_bytes))
            + sum(&mut self.updates.iter().map(|update| update.temporary_bytes))
            + sum(&mut self.updates.iter().flat_map(|update| {
                let held = |id: &AllocationId| self.allocations.get(id.index());
                update.state.iter().filter_map(held).map(|a| a.bytes)
            }))
    }

    fn check_allocations(&self) -> Result<(), TraceError> {
        for (i, allocation) in self.allocations.iter().enumerate() {
            let owner = || format!("allocation {i}");
            in_range(
                "device",
                allocation.device as usize,
                owner,
                self.devices.len(),
            )?;
            self.check_string(allocation.name, owner)?;
            if let Some(op) = allocation.producer {
                in_range("op", op.index(), owner, self.ops.len())?;
            }
            let mut last: Option<OpIndex> = None;
            for &(start, end) in &allocation.natural {
                if start >= end {
                    return Err(disorder(
                        owner(),
                        "a natural range must start before it ends",
                    ));
                }
                if last.is_some_and(|last| start < last) {
                    return Err(disorder(
                        owner(),
                        "natural ranges must be sorted and disjoint",
                    ));
                }
                in_range("position", end.index(), owner, self.ops.len() + 1)?;
                last = Some(end);
            }
            if let (Some(producer), Some(&(start, _))) =
                (allocation.producer, allocation.natural.first())
                && start < producer
            {
                return Err(disorder(
                    owner(),
                    "it is alive before the op that creates it",
                ));
            }
        }
        Ok(())
    }

    fn check_fixed_parameters(&self) -> Result<(), TraceError> {
        let fixed = &self.meta.fixed_parameters;
        for id in fixed {
            let owner = || "fixed parameters".to_owned();
            in_range("allocation", id.index(), owner, self.allocations.len())?;
        }
        if !fixed.is_sorted_by(|a, b| a < b) {
            let owner = "fixed parameters".to_owned();
            return Err(disorder(owner, "they must be ascending"));
        }
        Ok(())
    }

    fn check_returns(&self) -> Result<(), TraceError> {
        let returns = self.meta.inference.iter().flat_map(|it| &it.returns);
        for value in returns {
            let owner = || "what forward returns".to_owned();
            in_range("value", value.index(), owner, self.values.len())?;
        }
        Ok(())
    }

    fn check_ops(&self) -> Result<(), TraceError> {
        let mut phase = Phase::Forward;
        for (i, op) in self.ops.iter().enumerate() {
            let owner = || format!("op {i}");
            for string in [op.name, op.module, op.source, op.arguments] {
                self.check_string(string, owner)?;
            }
            for value in op.reads.iter().chain(&op.writes).chain(&op.outputs) {
                in_range("value", value.index(), owner, self.values.len())?;
            }
            if op.phase < phase {
                return Err(disorder(
                    owner(),
                    "phases must run forward, backward, optimizer",
                ));
            }
            phase = op.phase;
        }
        Ok(())
    }

    fn check_saved(&self) -> Result<(), TraceError> {
        for (i, saved) in self.saved.iter().enumerate() {
            let owner = || format!("saved tensor {i}");
            in_range("value", saved.value.index(), owner, self.values.len())?;
            in_range("position", saved.release.index(), owner, self.ops.len() + 1)?;
            let unpack = saved.unpack.unwrap_or(saved.release);
            if saved.pack > unpack || unpack > saved.release {
                return Err(disorder(
                    owner(),
                    "pack, unpack and release must be in this order",
                ));
            }
        }
        Ok(())
    }

    fn check_regions(&self) -> Result<(), TraceError> {
        for (i, region) in self.regions.iter().enumerate() {
            let owner = || format!("region {i}");
            self.check_string(region.module, owner)?;
            self.check_string(region.class, owner)?;
            in_range("position", region.end.index(), owner, self.ops.len() + 1)?;
            if region.start > region.end {
                return Err(disorder(owner(), "a region must start before it ends"));
            }
        }
        Ok(())
    }

    fn check_updates(&self) -> Result<(), TraceError> {
        for (i, update) in self.updates.iter().enumerate() {
            let owner = || format!("update {i}");
            in_range(
                "allocation",
                update.parameter.index(),
                owner,
                self.allocations.len(),
            )?;
            in_range(
                "allocation",
                update.gradient.index(),
                owner,
                self.allocations.len(),
            )?;
            in_range("position", update.ready.index(), owner, self.ops.len() + 1)?;
            for state in &update.state {
                in_range("allocation", state.index(), owner, self.allocations.len())?;
            }
        }
        for (i, coupling) in self.couplings.iter().flatten().enumerate() {
            in_range(
                "op",
                coupling.op.index(),
                || format!("coupling {i}"),
                self.ops.len(),
            )?;
        }
        Ok(())
    }

    fn check_string(&self, index: u32, owner: impl Fn() -> String) -> Result<(), TraceError> {
        in_range("string", index as usize, owner, self.strings.len())
    }
}

fn in_range(
    what: &'static str,
    index: usize,
    owner: impl Fn() -> String,
    limit: usize,
) -> Result<(), TraceError> {
    if index < limit {
        return Ok(());
    }
    Err(TraceError::OutOfRange {
        what,
        index: index as u64,
        owner: owner(),
        limit,
    })
}

fn disorder(owner: String, rule: &'static str) -> TraceError {
    TraceError::Disorder { owner, rule }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{ValueId, sample};

    #[test]
    fn the_sample_is_valid() {
        assert_eq!(sample::chain().check(), Ok(()));
    }

    #[test]
    fn each_rule_is_checked() {
        type Breakage = fn(&mut Trace);
        let broken: [(&str, Breakage); 11] = [
            ("value", |t| t.ops[1].reads[0] = ValueId(99)),
            ("allocation", |t| t.values[0].allocation = AllocationId(99)),
            ("allocation", |t| {
                t.updates[0].state = vec![AllocationId(99)];
            }),
            ("of fixed parameters is out of range", |t| {
                t.meta.fixed_parameters = vec![AllocationId(99)];
            }),
            ("ascending", |t| {
                t.meta.fixed_parameters = vec![AllocationId(1); 2];
            }),
            ("string", |t| t.ops[0].name = 99),
            ("must start", |t| {
                t.allocations[0].natural = vec![(OpIndex(3), OpIndex(3))];
            }),
            ("sorted", |t| {
                t.allocations[0].natural = vec![(OpIndex(2), OpIndex(4)), (OpIndex(1), OpIndex(5))];
            }),
            ("order", |t| t.saved[0].pack = OpIndex(8)),
            ("phases", |t| t.ops[1].phase = Phase::Optimizer),
            ("empty", |t| t.strings[0] = "x".into()),
        ];
        for (word, break_it) in broken {
            let mut trace = sample::chain();
            break_it(&mut trace);
            let message = trace.check().expect_err(word).to_string();
            assert!(message.contains(word), "{word}: {message}");
        }
    }
}
