//! How long a step waits for what is offloaded.
//!
//! Responsible for the time that transfers add to a step: what they take from the device that computes, and the
//! waits where computing is ahead of them. Not responsible for which transfers there are, or when they have to
//! have ended ([`crate::step`]).
//!
//! # Model
//!
//! One transfer runs at a time, in the order they are asked for, at the rate of its direction. Ops take their
//! planned seconds; replays are left out, which gives transfers less time to hide in than they have. On a device
//! without memory of its own (the CPU), the same cores compute and copy, so each byte also costs a copy.

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::cost::{CostError, Costs};
use crate::plan::instructions::Tier;
use crate::step::{Transfer, UpdateTurn, Variant, update_turns};
use crate::trace::{AllocationId, OpIndex, ParameterUpdate, Trace};

/// A place for what is offloaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Where it is.
    pub tier: Tier,
    /// The folder, for files; empty for the host's memory.
    #[serde(default)]
    pub folder: String,
    /// How fast it takes bytes.
    pub write_bytes_per_second: f64,
    /// How fast it gives them back.
    pub read_bytes_per_second: f64,
}

impl Offer {
    /// Checks the rates.
    ///
    /// # Errors
    ///
    /// Names the one that is not positive and finite.
    pub fn check(&self) -> Result<(), CostError> {
        for (what, value) in [
            ("write_bytes_per_second", self.write_bytes_per_second),
            ("read_bytes_per_second", self.read_bytes_per_second),
        ] {
            if !value.is_finite() || value <= 0.0 {
                let what = format!("offload.{what}");
                return Err(CostError::NotPositive { what, value });
            }
        }
        Ok(())
    }
}

/// Seconds that computing loses for one transfer, whatever its size. An estimate: the executor's own work, and two
/// wake-ups of another thread.
const REQUEST_SECONDS: f64 = 5e-5;

/// Transfers of one step in time.
#[derive(Debug, Clone)]
pub(in crate::plan) struct Schedule {
    offer: Offer,
    /// Seconds that the device which computes loses for each byte that moves.
    copy_seconds_per_byte: f64,
    /// Seconds from the start of the step to each op; one more for its end.
    clock: Vec<f64>,
    /// When the transfer under way of each allocation ends.
    ends: Vec<f64>,
}

impl Schedule {
    /// For the ops of a trace.
    pub(in crate::plan) fn new(trace: &Trace, offer: Offer, costs: &Costs) -> Self {
        // A copy reads and writes each byte.
        let copy = if trace.meta.device_kind == "cpu" {
            costs.copy_seconds(1.0)
        } else {
            0.0
        };
        let op_seconds = (0..trace.ops.len()).map(|op| costs.seconds(op));
        Self::of(offer, copy, op_seconds, trace.allocations.len())
    }

    fn of(
        offer: Offer,
        copy_seconds_per_byte: f64,
        op_seconds: impl Iterator<Item = f64>,
        allocations: usize,
    ) -> Self {
        let mut clock = vec![0.0];
        let mut now = 0.0;
        clock.extend(op_seconds.map(|seconds| {
            now += seconds;
            now
        }));
        Self {
            offer,
            copy_seconds_per_byte,
            clock,
            ends: vec![0.0; allocations],
        }
    }

    /// Seconds that `transfers`, in the order they happen, add to the step.
    pub(in crate::plan) fn seconds(
        &mut self,
        transfers: &[Transfer],
        bytes_of: impl Fn(AllocationId) -> Bytes,
    ) -> f64 {
        self.added(transfers.iter().map(|&transfer| (0.0, transfer)), bytes_of)
    }

    /// Seconds that the transfers of passes add to a step whose passes begin so many seconds after each other.
    pub(in crate::plan) fn seconds_of_passes(
        &mut self,
        passes: &[Vec<Transfer>],
        pass_seconds: f64,
        bytes_of: impl Fn(AllocationId) -> Bytes,
    ) -> f64 {
        let begins = std::iter::successors(Some(0.0), |begin| Some(begin + pass_seconds));
        let transfers = begins.zip(passes).flat_map(|(begin, transfers)| {
            let transfers = transfers.iter();
            transfers.map(move |&transfer| (begin, transfer))
        });
        self.added(transfers, bytes_of)
    }

    /// Seconds that transfers add, each with when its pass begins.
    fn added(
        &mut self,
        transfers: impl Iterator<Item = (f64, Transfer)>,
        bytes_of: impl Fn(AllocationId) -> Bytes,
    ) -> f64 {
        // The channel is free from here on; computing waited so long in all; copies took so long.
        let (mut free, mut waited, mut copied) = (0.0_f64, 0.0_f64, 0.0_f64);
        for (begin, transfer) in transfers {
            let Some((position, id)) = parts(transfer) else {
                continue;
            };
            let now = begin + self.at(position.index()) + waited;
            let bytes = bytes_of(id).as_f64();
            let rate = match transfer {
                Transfer::Out { .. } => Some(self.offer.write_bytes_per_second),
                Transfer::Fetch { .. } | Transfer::Ahead { .. } => {
                    Some(self.offer.read_bytes_per_second)
                }
                Transfer::Settled { .. }
                | Transfer::Asked { .. }
                | Transfer::Shrunk { .. }
                | Transfer::Expanded { .. } => None,
            };
            if let Some(rate) = rate {
                free = free.max(now) + bytes / rate;
                self.ends[id.index()] = free;
                copied += bytes * self.copy_seconds_per_byte + REQUEST_SECONDS;
            }
            let waits = !matches!(transfer, Transfer::Out { .. } | Transfer::Ahead { .. });
            if waits {
                waited += (self.ends[id.index()] - now).max(0.0);
            }
        }
        waited + copied
    }

    /// Seconds that moving the optimizer's state adds to a step whose updates take `update_seconds` in all. Each
    /// update takes of that by the bytes it moves; the transfers of activations are not looked at.
    pub(in crate::plan) fn state_seconds(
        &self,
        trace: &Trace,
        variant: Variant,
        update_seconds: f64,
    ) -> f64 {
        if variant.offload_optimizer.is_none() {
            return 0.0;
        }
        let (moved_as_one, sliced) = (
            variant.states_moved(trace),
            variant.offloaded_moments(trace),
        );
        let moved = |update: &ParameterUpdate| update.moved_bytes.as_f64().max(1.0);
        let all: f64 = trace.updates.iter().map(moved).sum();
        let mut ends = vec![0.0; trace.updates.len()];
        // The channel is free from here on; updates and waits took so long so far; waits and copies alone.
        let (mut free, mut elapsed, mut waited, mut copied) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64);
        for (position, turn) in update_turns(trace, variant) {
            let now = self.at(position.index()) + elapsed;
            let (UpdateTurn::Fetch(number)
            | UpdateTurn::Ahead(number)
            | UpdateTurn::Asked(number)
            | UpdateTurn::Update(number)
            | UpdateTurn::Out(number)
            | UpdateTurn::Settled(number)) = turn;
            let update = &trace.updates[number];
            let rate = match turn {
                UpdateTurn::Fetch(_) | UpdateTurn::Ahead(_) => self.offer.read_bytes_per_second,
                UpdateTurn::Out(_) => self.offer.write_bytes_per_second,
                UpdateTurn::Update(_) => {
                    elapsed += update_seconds * moved(update) / all;
                    // A slice comes before it is updated, and goes before the next one comes.
                    for moment in &sliced[number] {
                        let bytes = moment.bytes.as_f64();
                        let wait = bytes / self.offer.read_bytes_per_second
                            + bytes / self.offer.write_bytes_per_second;
                        free = free.max(now) + wait;
                        waited += wait;
                        elapsed += wait;
                        copied += 2.0 * bytes * self.copy_seconds_per_byte;
                        let tensors = 1 + u32::from(moment.lower_bytes > Bytes::ZERO);
                        let count = u32::try_from(moment.slices()).unwrap_or(u32::MAX);
                        copied += 2.0 * f64::from(tensors) * f64::from(count) * REQUEST_SECONDS;
                    }
                    continue;
                }
                UpdateTurn::Asked(_) | UpdateTurn::Settled(_) => f64::INFINITY,
            };
            if rate.is_finite() {
                let states = &moved_as_one[number];
                let sizes = states.iter().map(|id| trace.allocations[id.index()].bytes);
                let bytes = sizes.sum::<Bytes>().as_f64();
                free = free.max(now) + bytes / rate;
                ends[number] = free;
                let requests = states.iter().map(|_| REQUEST_SECONDS);
                copied += bytes * self.copy_seconds_per_byte + requests.sum::<f64>();
            }
            if !matches!(turn, UpdateTurn::Ahead(_) | UpdateTurn::Out(_)) {
                let wait = (ends[number] - now).max(0.0);
                waited += wait;
                elapsed += wait;
            }
        }
        waited + copied
    }

    /// The least that moving an allocation out and back adds, however well it hides.
    pub(super) fn least_seconds(&self, bytes: Bytes) -> f64 {
        2.0 * (bytes.as_f64() * self.copy_seconds_per_byte + REQUEST_SECONDS)
    }

    /// The most: both ways are waited for.
    pub(super) fn most_seconds(&self, bytes: Bytes) -> f64 {
        let ways = 1.0 / self.offer.write_bytes_per_second + 1.0 / self.offer.read_bytes_per_second;
        self.least_seconds(bytes) + bytes.as_f64() * ways
    }

    /// Bytes that could move out before op `until` without a wait, and back after it.
    pub(super) fn hidden(&self, until: usize) -> (Bytes, Bytes) {
        let end = self.clock.last().copied().unwrap_or(0.0);
        let middle = self.at(until);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and `as` saturates"
        )]
        let whole = |seconds: f64, rate: f64| Bytes((seconds * rate).max(0.0) as u64);
        (
            whole(middle, self.offer.write_bytes_per_second),
            whole(end - middle, self.offer.read_bytes_per_second),
        )
    }

    fn at(&self, position: usize) -> f64 {
        let last = self.clock.len() - 1;
        self.clock[position.min(last)]
    }
}

/// Where, and of what; `None` for what goes nowhere.
const fn parts(transfer: Transfer) -> Option<(OpIndex, AllocationId)> {
    match transfer {
        Transfer::Out { at, allocation }
        | Transfer::Settled { at, allocation }
        | Transfer::Fetch { at, allocation }
        | Transfer::Ahead { at, allocation }
        | Transfer::Asked { at, allocation } => Some((at, allocation)),
        Transfer::Shrunk { .. } | Transfer::Expanded { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten ops of a second each; writing at 2, reading at 4 bytes a second; copies cost nothing.
    fn schedule() -> Schedule {
        let offer = Offer {
            tier: Tier::Disk,
            folder: String::new(),
            write_bytes_per_second: 2.0,
            read_bytes_per_second: 4.0,
        };
        Schedule::of(offer, 0.0, std::iter::repeat_n(1.0, 10), 2)
    }

    fn seconds(transfers: &[Transfer]) -> f64 {
        schedule().seconds(transfers, |_| Bytes(4))
    }

    fn out(at: u32, allocation: u32) -> Transfer {
        let (at, allocation) = (OpIndex(at), AllocationId(allocation));
        Transfer::Out { at, allocation }
    }

    fn settled(at: u32, allocation: u32) -> Transfer {
        let (at, allocation) = (OpIndex(at), AllocationId(allocation));
        Transfer::Settled { at, allocation }
    }

    #[test]
    fn a_write_that_has_time_costs_no_wait() {
        assert!(seconds(&[out(1, 0), settled(3, 0)]) < 1e-3);
    }

    #[test]
    fn a_write_that_must_end_at_once_is_waited_for() {
        let waited = seconds(&[out(1, 0), settled(1, 0)]);
        assert!((waited - 2.0).abs() < 1e-3, "{waited}");
    }

    #[test]
    fn transfers_wait_for_each_other() {
        // The second starts when the first ended, a second late.
        let waited = seconds(&[out(1, 0), out(2, 1), settled(4, 1)]);
        assert!((waited - 1.0).abs() < 1e-3, "{waited}");
    }

    #[test]
    fn what_is_fetched_ahead_is_waited_for_where_it_is_asked_for() {
        let (at, allocation) = (OpIndex(5), AllocationId(0));
        let ahead = Transfer::Ahead { at, allocation };
        let asked = |at| Transfer::Asked {
            at: OpIndex(at),
            allocation,
        };
        assert!(seconds(&[ahead, asked(6)]) < 1e-3);
        let at_once = seconds(&[ahead, asked(5)]);
        assert!((at_once - 1.0).abs() < 1e-3, "{at_once}");
        let fetched = seconds(&[Transfer::Fetch { at, allocation }]);
        assert!((fetched - 1.0).abs() < 1e-3, "{fetched}");
    }

    #[test]
    fn what_one_pass_began_the_next_waits_for() {
        let transfers = [vec![out(1, 0), out(9, 1)], vec![settled(0, 1)]];
        let waited = schedule().seconds_of_passes(&transfers, 10.0, |_| Bytes(4));
        assert!((waited - 1.0).abs() < 1e-3, "{waited}");
        let late = schedule().seconds_of_passes(&transfers, 11.0, |_| Bytes(4));
        assert!(late < 1e-3, "{late}");
    }

    #[test]
    fn a_rate_of_zero_is_refused_by_name() {
        let offer = Offer {
            tier: Tier::Host,
            folder: String::new(),
            write_bytes_per_second: 0.0,
            read_bytes_per_second: 1.0,
        };
        let error = offer.check().unwrap_err().to_string();
        assert!(error.contains("offload.write_bytes_per_second"), "{error}");
    }
}
