//! Offloaded parameters: which they are, in which order a step uses them, and what moves for that.
//!
//! Responsible for what `docs/concepts/transformed-trace.md` says under "Parameters elsewhere". What is in memory at
//! which use is [`super::room`]'s. Not responsible for the peak: the room counts throughout (`layout/events.rs`).

use super::room::{Move, Room};
use super::updates::{UpdateTurn, update_turns, updates_end};
use crate::bytes::Bytes;
use crate::step::sweep::change::Replay;
use crate::step::sweep::traffic::Transfer;
use crate::step::variant::{ParametersAway, Variant};
use crate::trace::{AllocationId, Category, Op, OpIndex, Phase, Trace};

/// How a step runs, as far as it matters when parameters are used.
#[derive(Debug, Clone, Copy)]
pub struct Passes<'a> {
    /// When the updates run.
    pub variant: Variant,
    /// Micro-batches; the trace is of one of them.
    pub pieces: u64,
    /// What runs again in each backward, in order.
    pub replays: &'a [Replay],
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
        let once = Passes {
            variant,
            pieces: 1,
            replays: &[],
        };
        let uses = self.uses_in(trace, once).into_iter().flatten();
        let sizes = uses.map(|used| used.items.iter().map(size).sum());
        sizes.max().unwrap_or_default()
    }

    /// The order in which a step uses them. One that is used by several ops in a row is named once.
    #[must_use]
    pub fn order(self, trace: &Trace, passes: Passes<'_>) -> Vec<AllocationId> {
        let mut order: Vec<AllocationId> = Vec::new();
        for used in self.uses_in(trace, passes).into_iter().flatten() {
            for item in used.items {
                if order.last() != Some(&item) {
                    order.push(item);
                }
            }
        }
        order
    }

    /// What of them moves in a step that is one of many, in order, for each of its micro-batches.
    #[must_use]
    pub fn transfers(self, trace: &Trace, passes: Passes<'_>) -> Vec<Vec<Transfer>> {
        let mut traffic = self.traffic(trace, passes);
        let passes = self.uses_in(trace, passes);
        let mut step = || -> Vec<Vec<Transfer>> {
            let pass = |uses: &Vec<Use>| uses.iter().flat_map(|used| traffic.moved(used)).collect();
            passes.iter().map(pass).collect()
        };
        // What is there at the start is what the step before left.
        step();
        step()
    }

    /// The same with a room of what is ever in it: of parameters that cannot be halved, a room is seldom full. What
    /// moves stays the same, as nothing ever had to go, or could not come, for the bytes that are left out.
    #[must_use]
    pub fn snug(self, trace: &Trace, passes: Passes<'_>) -> Self {
        let mut traffic = self.traffic(trace, passes);
        let uses = self.uses_in(trace, passes).concat();
        let mut most = Bytes::ZERO;
        for used in uses.iter().chain(&uses) {
            traffic.moved(used);
            most = most.max(Bytes(traffic.room.here_bytes()));
        }
        Self {
            room_bytes: self.room_bytes.min(most),
            ..self
        }
    }

    fn traffic(self, trace: &Trace, passes: Passes<'_>) -> Traffic {
        let items: Vec<AllocationId> = self.of(trace).collect();
        let place = |id: &AllocationId| items.binary_search(id).ok();
        let sizes = items.iter().map(|id| trace.allocations[id.index()].bytes.0);
        let order = self.order(trace, passes);
        let order = order.iter().filter_map(place).collect();
        let (room, ahead) = (self.room_bytes.0, self.ahead_bytes.0);
        Traffic {
            room: Room::new(sizes.collect(), order, room, ahead),
            outgoing: vec![false; items.len()],
            items,
        }
    }

    /// Whatever uses some of them, in order, for each micro-batch. The last one has the updates.
    fn uses_in(self, trace: &Trace, passes: Passes<'_>) -> Vec<Vec<Use>> {
        let optimizer = |op: &Op| op.phase == Phase::Optimizer;
        let begin = trace.ops.iter().position(optimizer);
        let begin = begin.unwrap_or(trace.ops.len());
        let variant = passes.variant;
        let end = if variant.updates_one_by_one() {
            updates_end(trace, variant)
        } else {
            trace.ops.len()
        };
        let ops = |end: usize| {
            let mut uses = self.used_by_replays(trace, passes.replays);
            uses.extend(self.used_by_ops(trace, end));
            uses
        };
        let in_order = |mut uses: Vec<Use>| {
            // At one position, in the order in which they were put down.
            uses.sort_by_key(|used| used.at);
            uses
        };
        let mut last = self.used_by_updates(trace, variant);
        last.extend(ops(end));
        let before = (1..passes.pieces).map(|_| in_order(ops(begin)));
        let mut all: Vec<Vec<Use>> = before.collect();
        all.push(in_order(last));
        all
    }

    fn used_by_updates(self, trace: &Trace, variant: Variant) -> Vec<Use> {
        let turns = update_turns(trace, variant).into_iter();
        let updates = turns.filter_map(|(at, turn)| match turn {
            UpdateTurn::Update(update) => Some((at, trace.updates[update].parameter)),
            _ => None,
        });
        let updates = updates.filter(|&(_, parameter)| self.has(trace, parameter));
        let uses = updates.map(|(at, parameter)| Use {
            at,
            items: vec![parameter],
            written: true,
        });
        uses.collect()
    }

    fn used_by_replays(self, trace: &Trace, replays: &[Replay]) -> Vec<Use> {
        let uses = replays.iter().map(|&Replay { at, op }| Use {
            at,
            items: self.used_by(trace, &trace.ops[op.index()]),
            written: false,
        });
        uses.filter(|used| !used.items.is_empty()).collect()
    }

    /// By the ops before `end`.
    fn used_by_ops(self, trace: &Trace, end: usize) -> Vec<Use> {
        let uses = (0..).map(OpIndex).zip(&trace.ops[..end]);
        let uses = uses.map(|(at, op)| Use {
            at,
            items: self.used_by(trace, op),
            written: false,
        });
        uses.filter(|used| !used.items.is_empty()).collect()
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
#[derive(Clone)]
struct Use {
    at: OpIndex,
    items: Vec<AllocationId>,
    /// It is an update, after which the parameter has to be written.
    written: bool,
}

/// What moves from use to use.
struct Traffic {
    items: Vec<AllocationId>,
    room: Room,
    /// Items whose write has begun and was not waited for.
    outgoing: Vec<bool>,
}

impl Traffic {
    /// What moves for a use.
    fn moved(&mut self, used: &Use) -> Vec<Transfer> {
        let at = used.at;
        let places = used.items.iter();
        let needed: Vec<usize> = places
            .filter_map(|id| self.items.binary_search(id).ok())
            .collect();
        let mut transfers = Vec::new();
        for what in self.room.need(&needed) {
            let (Move::Evict(item) | Move::Fetch(item) | Move::Ahead(item) | Move::Await(item)) =
                what;
            let allocation = self.items[item];
            transfers.extend(match what {
                Move::Evict(_) => std::mem::take(&mut self.outgoing[item])
                    .then_some(Transfer::Settled { at, allocation }),
                Move::Fetch(_) => Some(Transfer::Fetch { at, allocation }),
                Move::Ahead(_) => Some(Transfer::Ahead { at, allocation }),
                Move::Await(_) => Some(Transfer::Asked { at, allocation }),
            });
        }
        for item in needed.into_iter().filter(|_| used.written) {
            self.outgoing[item] = true;
            let allocation = self.items[item];
            transfers.push(Transfer::Out { at, allocation });
        }
        transfers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample::Builder;
    use crate::trace::{ParameterUpdate, ValueId};

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

    fn fetch(op: u32, allocation: AllocationId) -> Transfer {
        let at = OpIndex(op);
        Transfer::Fetch { at, allocation }
    }

    fn settled(op: u32, allocation: AllocationId) -> Transfer {
        let at = OpIndex(op);
        Transfer::Settled { at, allocation }
    }

    fn out(op: u32, allocation: AllocationId) -> Transfer {
        let at = OpIndex(op);
        Transfer::Out { at, allocation }
    }

    #[test]
    fn a_use_is_an_op_or_an_update_and_uses_in_a_row_are_one() {
        let (trace, [first, second]) = two_layers();
        assert_eq!(trace.check(), Ok(()));
        let (away, variant) = away(64, 0);
        assert_eq!(away.of(&trace).collect::<Vec<_>>(), [first, second]);
        assert_eq!(
            away.order(&trace, once(variant)),
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
        assert_eq!(away.order(&trace, once(variant)), [second]);
        assert_eq!(away.held_bytes(&trace), Bytes(64));
    }

    #[test]
    fn what_moves_in_a_step_is_what_the_room_does_not_hold() {
        let (trace, [first, second]) = two_layers();
        // Room for the larger of the two: each use of the other brings it.
        let (narrow, variant) = away(64, 0);
        assert_eq!(
            narrow.transfers(&trace, once(variant)),
            [[
                settled(0, second),
                fetch(0, first),
                fetch(1, second),
                fetch(4, first),
                out(7, first),
                settled(7, first),
                fetch(7, second),
                out(7, second),
            ]]
        );
        // Room for both: nothing comes, and what changed is written all the same.
        let (wide, variant) = away(96, 0);
        let moved = wide.transfers(&trace, once(variant));
        assert_eq!(moved, [[out(7, first), out(7, second)]]);
    }

    #[test]
    fn each_piece_but_the_last_ends_before_the_updates() {
        let (trace, [first, second]) = two_layers();
        let (narrow, variant) = away(64, 0);
        let passes = Passes {
            pieces: 2,
            ..once(variant)
        };
        assert_eq!(
            narrow.order(&trace, passes),
            [first, second, first, second, first, second],
            "forward and backward of one piece, and of the other with the updates"
        );
        assert_eq!(
            narrow.transfers(&trace, passes),
            [
                vec![
                    settled(0, second),
                    fetch(0, first),
                    fetch(1, second),
                    fetch(4, first),
                ],
                vec![
                    fetch(1, second),
                    fetch(4, first),
                    out(7, first),
                    settled(7, first),
                    fetch(7, second),
                    out(7, second),
                ],
            ]
        );
    }

    #[test]
    fn a_snug_room_holds_what_is_ever_in_it_and_moves_the_same() {
        let (trace, _) = two_layers();
        for (room, expected) in [(64, 64), (95, 64), (96, 96), (1000, 96)] {
            let (wide, variant) = away(room, 0);
            let snug = wide.snug(&trace, once(variant));
            assert_eq!(snug.room_bytes, Bytes(expected), "of {room}");
            let moved = |away: ParametersAway| away.transfers(&trace, once(variant));
            assert_eq!(moved(snug), moved(wide));
        }
    }

    #[test]
    fn what_runs_again_uses_them_too() {
        let (trace, [first, second]) = two_layers();
        let (narrow, variant) = away(64, 0);
        // The first layer's op, before backward uses the second's parameter.
        let replays = [Replay {
            at: OpIndex(3),
            op: OpIndex(0),
        }];
        let passes = Passes {
            replays: &replays,
            ..once(variant)
        };
        assert_eq!(
            narrow.order(&trace, passes),
            [first, second, first, second, first, second]
        );
    }

    fn once(variant: Variant) -> Passes<'static> {
        Passes {
            variant,
            pieces: 1,
            replays: &[],
        }
    }
}
