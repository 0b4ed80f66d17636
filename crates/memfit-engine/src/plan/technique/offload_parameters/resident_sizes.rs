//! Offloaded parameters: how much room they may have, with what else, and what moving them costs.
//!
//! Responsible for which rooms are tried, beside which other outer choices, and for the seconds that a plan's transfers
//! of parameters add, those for what runs again included. Not responsible for whether parameters may go (`refusal.rs`),
//! nor for which go or when they move (`step/offload/`).

use super::refusal::{LEAST_PARAMETER, refusal};
use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::plan::context::Planner;
use crate::plan::search::problem::Candidate;
use crate::plan::search::transfers::{Offer, Schedule};
use crate::plan::technique::fuse_optimizer;
use crate::step::{Evaluator, ParametersAway, Passes, Replay, StepModel, Treatment, Variant};
use crate::trace::{AllocationId, Phase, Trace};

/// Rooms that are tried, in quarters of all parameters that may go; and the smallest that will do.
const ROOMS: [u64; 3] = [3, 2, 1];

impl Planner<'_> {
    /// Combinations with offloaded parameters: those that may be faster than what there is, and in any case those
    /// that leave the least in memory, in backward and after it: what none of them reaches, nothing does.
    pub(in crate::plan) fn with_rooms(
        &self,
        rooms: &[ParametersAway],
        best_seconds: f64,
    ) -> impl Iterator<Item = (Variant, u64)> {
        let (windows, states) = (self.windows(), self.states_away());
        let may_fuse = self.may_fuse_with_rooms();
        let narrow = rooms.len().saturating_sub(1);
        let mut variants = Vec::new();
        for (number, &room) in rooms.iter().enumerate() {
            let is_narrow = number == narrow;
            let (window, away) = if is_narrow {
                (windows.last(), states.last())
            } else {
                (windows.first(), states.first())
            };
            let with = |offload_optimizer| Variant {
                window_bytes: window.copied().unwrap_or_default(),
                offload_optimizer,
                fuse_optimizer: may_fuse,
                offload_parameters: Some(room),
                ..Variant::default()
            };
            let stays = with(None);
            let may_win = |variant: &Variant| {
                let seconds = self.base_seconds(self.costs, self.trace, *variant, 1);
                seconds < best_seconds
            };
            variants.extend(Some(stays).filter(|it| is_narrow && away.is_none() || may_win(it)));
            let goes = away.map(|&away| with(Some(away)));
            variants.extend(goes.filter(|it| is_narrow || may_win(it)));
            let after = Variant {
                fuse_optimizer: false,
                ..goes.unwrap_or(stays)
            };
            variants.extend(Some(after).filter(|_| is_narrow && may_fuse));
        }
        variants.into_iter().map(|variant| (variant, 1))
    }

    /// Whether updates may run inside backward while parameters are offloaded.
    fn may_fuse_with_rooms(&self) -> bool {
        !self.request.own_backward && fuse_optimizer::refusal(self.trace, self.request).is_none()
    }

    /// Offloaded parameters, from the largest room to the smallest; nothing where they have to stay.
    pub(in crate::plan) fn parameters_away(&self) -> Vec<ParametersAway> {
        let Some(narrow) = self.narrowest_room() else {
            return Vec::new();
        };
        let sizes = narrow.of(self.trace);
        let ahead_bytes = sizes
            .map(|id| self.trace.allocations[id.index()].bytes)
            .max();
        let ahead_bytes = ahead_bytes.unwrap_or_default();
        let all = narrow.bytes(self.trace);
        let quarters = ROOMS.map(|quarters| Bytes(all.0 / 4 * quarters));
        let next = narrow.room_bytes + ahead_bytes;
        let rooms = quarters.into_iter().filter(|&room| room > next);
        let once = Passes {
            variant: Variant {
                fuse_optimizer: self.may_fuse_with_rooms(),
                offload_parameters: Some(narrow),
                ..Variant::default()
            },
            pieces: 1,
            replays: &[],
        };
        let wide = rooms.chain(Some(next)).map(|room_bytes| {
            let away = ParametersAway {
                room_bytes,
                ahead_bytes,
                ..narrow
            };
            away.snug(self.trace, once)
        });
        wide.chain(Some(narrow)).collect()
    }

    /// Offloaded parameters in the smallest room that will do; `None` where they have to stay.
    pub(in crate::plan) fn narrowest_room(&self) -> Option<ParametersAway> {
        self.parameters_offer()?;
        let away = ParametersAway {
            room_bytes: Bytes::ZERO,
            ahead_bytes: Bytes::ZERO,
            least_bytes: LEAST_PARAMETER,
        };
        let variant = Variant {
            offload_parameters: Some(away),
            ..Variant::default()
        };
        let room_bytes = away.least_room(self.trace, variant);
        Some(ParametersAway { room_bytes, ..away })
    }

    /// Combinations of pieces with offloaded parameters, in the largest room and in the smallest: those that may be
    /// faster than what there is, and in any case the one that leaves the least in memory.
    pub(in crate::plan) fn pieces_with_rooms(
        &self,
        rooms: &[ParametersAway],
        variant: Variant,
        best_seconds: f64,
    ) -> Vec<(Variant, u64)> {
        let wide = rooms.first().map(|&room| Variant {
            offload_parameters: Some(room),
            ..variant
        });
        let narrow = rooms.last().map(|&room| Variant {
            offload_parameters: Some(room),
            window_bytes: self.windows().last().copied().unwrap_or_default(),
            offload_optimizer: self.states_away().last().copied(),
            ..variant
        });
        let variants: Vec<_> = [wide, narrow].into_iter().flatten().collect();
        let mut tries = self.in_pieces(&variants);
        let least = tries.last().copied();
        tries.retain(|&(variant, pieces)| {
            let trace = self.piece(pieces);
            let costs = self.costs.scaled(self.trace, &trace);
            let seconds = self.base_seconds(&costs, &trace, variant, pieces);
            seconds < best_seconds || Some((variant, pieces)) == least
        });
        tries
    }

    /// The place for parameters, if they may be offloaded.
    pub(in crate::plan) fn parameters_offer(&self) -> Option<&Offer> {
        let offer = self.request.offload.as_ref();
        offer.filter(|_| refusal(self.trace, self.request).is_none())
    }

    /// Seconds that moving parameters adds to a step; nothing where they stay.
    pub(in crate::plan) fn parameter_seconds(
        &self,
        costs: &Costs,
        trace: &Trace,
        passes: Passes<'_>,
    ) -> f64 {
        let away = passes.variant.offload_parameters;
        let Some((offer, away)) = self.parameters_offer().zip(away) else {
            return 0.0;
        };
        let mut schedule = Schedule::new(trace, offer.clone(), costs);
        let pass = costs.phase_seconds(trace, &[Phase::Forward, Phase::Backward]);
        let bytes_of = |id: AllocationId| trace.allocations[id.index()].bytes;
        schedule.seconds_of_passes(&away.transfers(trace, passes), pass, bytes_of)
    }

    /// Counts, in what a candidate adds to each pass, the parameters that come for what runs again. The search does
    /// without: it would have to lay the room out for every candidate.
    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    pub(in crate::plan) fn with_replayed_parameters(
        &self,
        costs: &Costs,
        trace: &Trace,
        once: Passes<'_>,
        candidate: Candidate,
    ) -> Candidate {
        if once.variant.offload_parameters.is_none() {
            return candidate;
        }
        let replays = &replays(trace, once.variant, &candidate.treatments)[..];
        let with = self.parameter_seconds(costs, trace, Passes { replays, ..once });
        let without = self.parameter_seconds(costs, trace, once);
        let more = (with - without).max(0.0) / once.pieces as f64;
        Candidate {
            added_seconds: candidate.added_seconds + more,
            ..candidate
        }
    }
}

/// What runs again in backward.
pub(in crate::plan) fn replays(
    trace: &Trace,
    variant: Variant,
    treatments: &[Treatment],
) -> Vec<Replay> {
    let model = StepModel::new(trace, variant);
    Evaluator::new(&model).replays(treatments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::CostSource;
    use crate::plan::search::limits::Share;
    use crate::plan::{PlanRequest, Tier};
    use crate::trace::Category;
    use crate::trace::sample::Builder;

    /// Two layers whose parameters take a second to come; backward of the second wants what the first made.
    fn two_layers() -> (Trace, AllocationId) {
        let mut builder = Builder::new(1);
        let input = builder.allocation(&[4], Category::Input, 0);
        let [first, second] = [0; 2].map(|_| builder.allocation(&[25_000], Category::Parameter, 0));
        let mut op = |phase, reads: &[_]| builder.op("aten.a.default", phase, reads, &[4]);
        let made = op(Phase::Forward, &[input, first]);
        let seen = op(Phase::Forward, &[made, second]);
        let gradient = op(Phase::Backward, &[seen, made, second]);
        op(Phase::Backward, &[gradient, first]);
        builder.save(made, 1, 2, 3);
        let made = builder.trace.allocation_of(made);
        (builder.finish(), made)
    }

    #[test]
    fn parameters_that_come_for_what_runs_again_take_time() {
        let (trace, made) = two_layers();
        let request = PlanRequest {
            offload: Some(Offer {
                tier: Tier::Disk,
                folder: String::new(),
                write_bytes_per_second: 1e5,
                read_bytes_per_second: 1e5,
            }),
            ..PlanRequest::default()
        };
        let op_seconds = vec![1e-3; trace.ops.len()];
        let costs = Costs::new(&trace, &CostSource::profile(op_seconds)).unwrap();
        let planner = Planner {
            trace: &trace,
            costs: &costs,
            ways: &[],
            request: &request,
            target: Bytes::ZERO,
            cap: Bytes::ZERO,
            unplanned_peak: Bytes::ZERO,
            may_shrink: false,
            may_narrow_state: false,
            is_new: false,
            share: Share::FULL,
        };
        let once = Passes {
            variant: Variant {
                offload_parameters: planner.narrowest_room(),
                ..Variant::default()
            },
            pieces: 1,
            replays: &[],
        };
        let more = |treatments: Vec<Treatment>| {
            let model = StepModel::new(&trace, once.variant);
            let candidate = Candidate {
                evaluation: Evaluator::new(&model).evaluate(&treatments),
                treatments,
                added_seconds: 1.0,
            };
            assert!(candidate.evaluation.valid);
            let counted = planner.with_replayed_parameters(&costs, &trace, once, candidate);
            counted.added_seconds - 1.0
        };
        let kept = vec![Treatment::Keep; trace.allocations.len()];
        assert!(more(kept.clone()).abs() < 1e-9);
        let mut dropped = kept;
        dropped[made.index()] = Treatment::DROP;
        // The first layer's comes for the replay, and the second's once more after it.
        let seconds = more(dropped);
        assert!((2.0..2.1).contains(&seconds), "{seconds}");
    }
}
