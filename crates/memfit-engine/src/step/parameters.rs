//! Parameters elsewhere: which they are, in which order a step uses them, and what moves for that.
//!
//! Responsible for what `docs/concepts/transformed-trace.md` says under "Parameters elsewhere". What is in memory at
//! which use is [`super::room`]'s. Not responsible for the peak: the room counts throughout (`events.rs`).

use super::model::Variant;
use super::room::{Move, Room};
use super::transfers::Transfer;
use super::updates::{UpdateTurn, update_turns, updates_end};
use crate::bytes::Bytes;
use crate::trace::{AllocationId, Category, Op, OpIndex, Trace};

/// Parameters that are elsewhere but for a room in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParametersAway {
    /// Most bytes of them in memory, or on their way, at a time.
    pub room_bytes: Bytes,
    /// Most of those that are on their way, or came ahead and are not used yet.
    pub ahead_bytes: Bytes,
    /// Smallest parameter that goes away.
    pub least_bytes: Bytes,
}

impl ParametersAway {
    /// Whether a parameter, or what else an allocation is, goes away.
    #[must_use]
    pub fn has(self, trace: &Trace, allocation: AllocationId) -> bool {
        let known = &trace.allocations[allocation.index()];
        let throughout = known.natural.first() == Some(&(OpIndex(0), trace.end()));
        let is_large = known.bytes >= self.least_bytes.max(Bytes(1));
        let is_fixed = || {
            let fixed = &trace.meta.fixed_parameters;
            fixed.binary_search(&allocation).is_ok()
        };
        known.category == Category::Parameter && throughout && is_large && !is_fixed()
    }

    /// All that go away.
    pub fn of(self, trace: &Trace) -> impl Iterator<Item = AllocationId> + '_ {
        let ids = (0..trace.allocations.len()).filter_map(|id| u32::try_from(id).ok());
        ids.map(AllocationId).filter(move |&id| self.has(trace, id))
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(self, trace: &Trace) -> Bytes {
        let sizes = self.of(trace);
        sizes.map(|id| trace.allocations[id.index()].bytes).sum()
    }

    /// What of them is in memory at most.
    #[must_use]
    pub fn held_bytes(self, trace: &Trace) -> Bytes {
        self.room_bytes.min(self.bytes(trace))
    }

    /// The smallest room in which every op of forward and backward finds all it uses, and every update its parameter.
    #[must_use]
    pub fn least_room(self, trace: &Trace, variant: Variant) -> Bytes {
        let size = |id: &AllocationId| trace.allocations[id.index()].bytes;
        let uses = self.uses(trace, variant).into_iter();
        let sizes = uses.map(|used| used.items.iter().map(size).sum());
        sizes.max().unwrap_or_default()
    }

    /// Names of parameters in the order in which a step uses them. One that is used by several ops in a row is named
    /// once.
    #[must_use]
    pub fn order(self, trace: &Trace, variant: Variant) -> Vec<AllocationId> {
        let mut order: Vec<AllocationId> = Vec::new();
        for used in self.uses(trace, variant) {
            for item in used.items {
                if order.last() != Some(&item) {
                    order.push(item);
                }
            }
        }
        order
    }

    /// What of them moves in a step that is one of many, in order.
    #[must_use]
    pub fn transfers(self, trace: &Trace, variant: Variant) -> Vec<Transfer> {
        let items: Vec<AllocationId> = self.of(trace).collect();
        let place = |id: &AllocationId| items.binary_search(id).ok();
        let sizes = items.iter().map(|id| trace.allocations[id.index()].bytes.0);
        let order = self.order(trace, variant);
        let order = order.iter().filter_map(place).collect();
        let mut room = Room::new(
            sizes.collect(),
            order,
            self.room_bytes.0,
            self.ahead_bytes.0,
        );
        let mut outgoing = vec![false; items.len()];
        let mut transfers = Vec::new();
        let uses = self.uses(trace, variant);
        // What is there at the start is what the step before left.
        for is_measured in [false, true] {
            for Use {
                at,
                items: used,
                written,
            } in &uses
            {
                let needed: Vec<usize> = used.iter().filter_map(place).collect();
                for what in room.need(&needed) {
                    let allocation = match what {
                        Move::Evict(item)
                        | Move::Fetch(item)
                        | Move::Ahead(item)
                        | Move::Await(item) => items[item],
                    };
                    let at = *at;
                    let transfer = match what {
                        Move::Evict(item) => {
                            if !std::mem::take(&mut outgoing[item]) {
                                continue;
                            }
                            Transfer::Settled { at, allocation }
                        }
                        Move::Fetch(_) => Transfer::Fetch { at, allocation },
                        Move::Ahead(_) => Transfer::Ahead { at, allocation },
                        Move::Await(_) => Transfer::Asked { at, allocation },
                    };
                    transfers.extend(is_measured.then_some(transfer));
                }
                for &item in needed.iter().filter(|_| *written) {
                    outgoing[item] = true;
                    let (at, allocation) = (*at, items[item]);
                    transfers.extend(is_measured.then_some(Transfer::Out { at, allocation }));
                }
            }
        }
        transfers
    }

    /// Every op and every update that uses some of them, in order.
    fn uses(self, trace: &Trace, variant: Variant) -> Vec<Use> {
        let updates = update_turns(trace, variant).into_iter();
        let mut updates = updates
            .filter_map(|(at, turn)| match turn {
                UpdateTurn::Update(update) => Some((at, trace.updates[update].parameter)),
                _ => None,
            })
            .filter(|&(_, parameter)| self.has(trace, parameter))
            .map(|(at, parameter)| Use {
                at,
                items: vec![parameter],
                written: true,
            })
            .peekable();
        let end = if variant.updates_one_by_one() {
            updates_end(trace, variant)
        } else {
            trace.ops.len()
        };
        let mut uses = Vec::new();
        for (at, op) in (0..).map(OpIndex).zip(&trace.ops[..end]) {
            while let Some(update) = updates.next_if(|update| update.at <= at) {
                uses.push(update);
            }
            let items = self.used_by(trace, op);
            if !items.is_empty() {
                uses.push(Use {
                    at,
                    items,
                    written: false,
                });
            }
        }
        uses.extend(updates);
        uses
    }

    /// Those that an op reads or writes, distinct.
    fn used_by(self, trace: &Trace, op: &Op) -> Vec<AllocationId> {
        let mut items = Vec::new();
        for &value in op.reads.iter().chain(&op.writes) {
            let allocation = trace.allocation_of(value);
            if self.has(trace, allocation) && !items.contains(&allocation) {
                items.push(allocation);
            }
        }
        items
    }
}

/// One op or update.
struct Use {
    at: OpIndex,
    items: Vec<AllocationId>,
    /// It is an update, after which the parameter has to be written.
    written: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample::Builder;
    use crate::trace::{ParameterUpdate, Phase, ValueId};

    /// Two layers of one parameter each, used in forward and in backward and updated at the end.
    fn two_layers() -> (Trace, [AllocationId; 2]) {
        let mut builder = Builder::new(1);
        let weights = [8, 16].map(|size| builder.allocation(&[size], Category::Parameter, 0));
        let input = builder.allocation(&[4], Category::Input, 0);
        let mut op =
            |phase, reads: &[ValueId], size| builder.op("aten.a.default", phase, reads, &[size]);
        let a = op(Phase::Forward, &[input, weights[0]], 4);
        // A view before the op that needs the bytes: still one use.
        let viewed = op(Phase::Forward, &[weights[1]], 1);
        let b = op(Phase::Forward, &[a, viewed, weights[1]], 4);
        let gb = op(Phase::Backward, &[b, weights[1]], 4);
        let ga = op(Phase::Backward, &[gb, weights[0]], 4);
        let gradients = [
            op(Phase::Backward, &[ga], 8),
            op(Phase::Backward, &[gb], 16),
        ];
        for (&weight, &gradient) in weights.iter().zip(&gradients) {
            builder.op_in_place("aten.add_.Tensor", Phase::Optimizer, weight, &[gradient]);
        }
        let ids = weights.map(|weight| builder.trace.allocation_of(weight));
        for (parameter, gradient) in ids.into_iter().zip(gradients) {
            let gradient = builder.trace.allocation_of(gradient);
            builder.trace.allocations[gradient.index()].category = Category::Gradient;
            builder.trace.updates.push(ParameterUpdate {
                parameter,
                gradient,
                ready: OpIndex(7),
                temporary_bytes: Bytes(0),
                moved_bytes: Bytes(96),
                state: Vec::new(),
            });
        }
        (builder.finish(), ids)
    }

    fn away(room_bytes: u64, least_bytes: u64) -> (ParametersAway, Variant) {
        let away = ParametersAway {
            room_bytes: Bytes(room_bytes),
            ahead_bytes: Bytes::ZERO,
            least_bytes: Bytes(least_bytes),
        };
        let offload_parameters = Some(away);
        (
            away,
            Variant {
                offload_parameters,
                ..Variant::default()
            },
        )
    }

    #[test]
    fn a_use_is_an_op_or_an_update_and_uses_in_a_row_are_one() {
        let (trace, [first, second]) = two_layers();
        assert_eq!(trace.check(), Ok(()));
        let (away, variant) = away(64, 0);
        assert_eq!(away.of(&trace).collect::<Vec<_>>(), [first, second]);
        assert_eq!(
            away.order(&trace, variant),
            [first, second, first, second],
            "forward, backward from the second on, its updates in the order of gradients"
        );
        assert_eq!(
            (away.bytes(&trace), away.held_bytes(&trace)),
            (Bytes(96), Bytes(64))
        );
        assert_eq!(away.least_room(&trace, variant), Bytes(64));
    }

    #[test]
    fn small_parameters_stay() {
        let (trace, [_, second]) = two_layers();
        let (away, variant) = away(64, 33);
        assert_eq!(away.of(&trace).collect::<Vec<_>>(), [second]);
        assert_eq!(away.order(&trace, variant), [second]);
        assert_eq!(away.held_bytes(&trace), Bytes(64));
    }

    #[test]
    fn what_moves_in_a_step_is_what_the_room_does_not_hold() {
        let (trace, [first, second]) = two_layers();
        // Room for the larger of the two: each use of the other brings it.
        let (narrow, variant) = away(64, 0);
        let at = OpIndex;
        let fetch = |op, allocation| Transfer::Fetch {
            at: at(op),
            allocation,
        };
        let settled = |op, allocation| Transfer::Settled {
            at: at(op),
            allocation,
        };
        let out = |op, allocation| Transfer::Out {
            at: at(op),
            allocation,
        };
        assert_eq!(
            narrow.transfers(&trace, variant),
            [
                settled(0, second),
                fetch(0, first),
                fetch(1, second),
                fetch(4, first),
                out(7, first),
                settled(7, first),
                fetch(7, second),
                out(7, second),
            ]
        );
        // Room for both: nothing comes, and what changed is written all the same.
        let (wide, variant) = away(96, 0);
        let moved = wide.transfers(&trace, variant);
        assert_eq!(moved, [out(7, first), out(7, second)]);
    }
}
