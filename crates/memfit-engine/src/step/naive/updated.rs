//! The part of the slow twin that knows of updates one by one, of state that is offloaded between them or in 8 bits,
//! and of offloaded parameters.
//!
//! Responsible for what the page says under "Optimizer state elsewhere", "Optimizer state in 8 bits", "Parameters elsewhere" and
//! "Optimizer step inside backward".

use std::collections::BTreeMap;

use super::twin::{Place, Twin, Updates};
use crate::bytes::Bytes;
use crate::step::Variant;
use crate::trace::{AllocationId, Category, Phase, Trace};

impl Updates {
    pub(super) fn order(&mut self, trace: &Trace, variant: Variant, end: usize) {
        for position in 0..=trace.ops.len() {
            for (i, update) in trace.updates.iter().enumerate() {
                let at = if variant.fuse_optimizer {
                    update.ready.index()
                } else {
                    end
                };
                if at == position {
                    self.in_order.push((i, position));
                }
            }
        }
        self.places = vec![(Place::Away, 0); self.in_order.len()];
    }

    /// Bytes of all states at a place.
    fn bytes_at(&self, place: Place) -> u64 {
        let there = self.places.iter().filter(|state| state.0 == place);
        there.map(|state| state.1).sum()
    }

    /// Has the window room for the state of the `n`th?
    fn may_come_ahead(&self, n: usize, window: u64) -> bool {
        let (place, bytes) = self.places[n];
        place == Place::Away && bytes > 0 && self.bytes_at(Place::Ahead) + bytes <= window
    }

    fn settle_oldest(&mut self) -> bool {
        let oldest = self
            .places
            .iter()
            .position(|state| state.0 == Place::Outgoing);
        if let Some(oldest) = oldest {
            self.places[oldest].0 = Place::Away;
        }
        oldest.is_some()
    }
}

/// Is this an offloaded parameter?
pub(super) fn is_parameter_away(trace: &Trace, variant: Variant, a: usize) -> bool {
    let Some(away) = variant.offload_parameters else {
        return false;
    };
    let allocation = &trace.allocations[a];
    let whole = allocation.natural.first();
    let throughout = whole.is_some_and(|&(s, e)| s.index() == 0 && e.index() == trace.ops.len());
    let least = away.least_bytes.0.max(1);
    let is_large = allocation.bytes.0 >= least;
    let fixed = &trace.meta.fixed_parameters;
    let is_fixed = || fixed.iter().any(|id| id.index() == a);
    allocation.category == Category::Parameter && throughout && is_large && !is_fixed()
}

/// Is `a` a moment in 8 bits, of update `i`?
fn is_narrow_state(trace: &Trace, variant: Variant, i: usize, a: usize) -> bool {
    let Some(narrow) = variant.eight_bit_state else {
        return false;
    };
    let update = &trace.updates[i];
    let parameter = update.parameter.index();
    let whole = trace.allocations[parameter].bytes.0;
    let Some(width) = width_of(trace, parameter) else {
        return false;
    };
    let alike = trace.allocations[a].bytes.0 == whole
        && trace.allocations[a].category == Category::OptimizerState;
    let is_its = update.state.iter().any(|state| state.index() == a);
    let is_large = whole / width * 4 >= narrow.least_bytes.0.max(4);
    is_its && alike && is_large && width_of(trace, a) == Some(width)
}

/// Bytes of the numbers of `a`, if they are of one type and that may be a moment's.
fn width_of(trace: &Trace, a: usize) -> Option<u64> {
    let values = trace.values.iter();
    let its = values.filter(|value| value.allocation.index() == a);
    let mut dtypes: Vec<&str> = its.map(|value| trace.string(value.dtype)).collect();
    dtypes.dedup();
    let width = match dtypes[..] {
        [] | ["float32"] => 4,
        ["bfloat16"] if trace.meta.half_parameters => 2,
        _ => return None,
    };
    let whole = trace.allocations[a].bytes.0.is_multiple_of(width);
    whole.then_some(width)
}

/// Bytes of each moment in 8 bits: a code for each number, and a scale for each 256 of them. The first has the lower halves of
/// its parameter's numbers, where they are kept.
pub(super) fn narrow_state_bytes(trace: &Trace, variant: Variant) -> BTreeMap<usize, u64> {
    let mut found = BTreeMap::new();
    let keeps_halves = variant.eight_bit_state.is_some_and(|it| it.lower_halves);
    for i in 0..trace.updates.len() {
        let mut is_first = true;
        for state in &trace.updates[i].state {
            if is_narrow_state(trace, variant, i, state.index()) {
                let width = width_of(trace, state.index()).unwrap_or(4);
                let numbers = trace.allocations[state.index()].bytes.0 / width;
                let has_halves = keeps_halves && is_first && width == 2;
                let halves = if has_halves { 2 * numbers } else { 0 };
                found.insert(state.index(), numbers + numbers.div_ceil(256) * 4 + halves);
                is_first = false;
            }
        }
    }
    found
}

/// Is `a` an offloaded moment in 8 bits of update `i`, which is fetched slice by slice?
fn comes_in_slices(trace: &Trace, variant: Variant, i: usize, a: usize) -> bool {
    let large = |least: u64| trace.allocations[a].bytes.0 >= least.max(1);
    let goes = variant.offload_optimizer.map(|away| away.least_bytes.0);
    is_narrow_state(trace, variant, i, a) && goes.is_some_and(large)
}

/// What offloaded parameters take all the time.
pub(super) fn room_of_parameters(trace: &Trace, variant: Variant) -> u64 {
    let Some(away) = variant.offload_parameters else {
        return 0;
    };
    let all = 0..trace.allocations.len();
    let all = all.filter(|&a| is_parameter_away(trace, variant, a));
    let all: u64 = all.map(|a| trace.allocations[a].bytes.0).sum();
    all.min(away.room_bytes.0)
}

impl Twin<'_> {
    /// Do the updates come at the end, one by one?
    const fn is_one_by_one(&self) -> bool {
        self.variant.one_by_one
            || self.variant.offload_optimizer.is_some()
            || self.variant.eight_bit_state.is_some()
            || self.variant.offload_parameters.is_some()
    }

    /// Number of ops that run.
    pub(super) fn end(&self) -> usize {
        let fuse = self.variant.fuse_optimizer;
        if !fuse && !self.is_one_by_one() {
            return self.trace.ops.len();
        }
        for (i, op) in self.trace.ops.iter().enumerate() {
            let belongs = |category| {
                let is = |&v| {
                    self.trace.allocations[self.trace.allocation_of(v).index()].category == category
                };
                op.reads.iter().any(is) || op.writes.iter().any(is)
            };
            let touches = belongs(Category::Parameter) || belongs(Category::OptimizerState);
            if op.phase == Phase::Optimizer && (fuse || touches) {
                return i;
            }
        }
        // An optimizer that touches none of them does not run.
        let phase = |phase| self.trace.ops.iter().position(|op| op.phase == phase);
        phase(Phase::Optimizer).unwrap_or(self.trace.ops.len())
    }

    /// Is this state that comes with its update?
    pub(super) fn is_away(&self, id: AllocationId) -> bool {
        let Some(away) = self.variant.offload_optimizer else {
            return false;
        };
        let allocation = &self.trace.allocations[id.index()];
        let least = away.least_bytes.0.max(1);
        allocation.category == Category::OptimizerState && allocation.bytes.0 >= least
    }

    /// The updates at `p`: inside backward those whose gradient is complete, each of which frees its gradient;
    /// or all at the end, where the gradients stay.
    pub(super) fn updates_at(&mut self, p: usize, end: usize) {
        let fuse = self.variant.fuse_optimizer;
        if !(fuse || self.is_one_by_one() && p == end) {
            return;
        }
        while let Some(&(i, position)) = self.updates.in_order.get(self.updates.ran) {
            if position != p {
                return;
            }
            let waiting = if fuse { self.waiting_gradients(p) } else { 0 };
            self.fetch_state();
            let extra = waiting + self.temporaries_of(i);
            let height = self.height(p, false, extra);
            self.see(height);
            self.send_state();
        }
    }

    /// An update that reads and writes moments in 8 bits makes no temporaries on a CPU; on other devices it takes 18
    /// bytes for each of a million numbers. Of moments that come in slices, one of such a slice is there.
    fn temporaries_of(&self, i: usize) -> u64 {
        let update = &self.trace.updates[i];
        let mut slice = 0;
        let mut halves_are_counted = false;
        for state in &update.state {
            if is_narrow_state(self.trace, self.variant, i, state.index()) {
                let width = width_of(self.trace, state.index()).unwrap_or(4);
                let all = self.trace.allocations[state.index()].bytes.0 / width;
                let numbers = all.min(1 << 20);
                let keeps_halves = self
                    .variant
                    .eight_bit_state
                    .is_some_and(|it| it.lower_halves);
                let has_halves = keeps_halves && width == 2 && !halves_are_counted;
                halves_are_counted = true;
                if comes_in_slices(self.trace, self.variant, i, state.index()) {
                    let halves = if has_halves { 2 * numbers } else { 0 };
                    slice += numbers + numbers.div_ceil(256) * 4 + halves;
                }
            }
        }
        let mut states = update.state.iter();
        if states.any(|&state| is_narrow_state(self.trace, self.variant, i, state.index())) {
            let parameter = update.parameter.index();
            let width = width_of(self.trace, parameter).unwrap_or(4);
            let numbers = self.trace.allocations[parameter].bytes.0 / width;
            let is_on_cpu = self.trace.meta.device_kind == "cpu";
            return if is_on_cpu {
                slice
            } else {
                slice + 18 * numbers.min(1 << 20)
            };
        }
        update.temporary_bytes.0
    }

    /// Gradients cut at `p` no longer count just before op `p`; those not yet updated do.
    fn waiting_gradients(&self, p: usize) -> u64 {
        let due = self.updates.in_order[self.updates.ran..].iter();
        let due = due.filter(|&&(_, position)| position == p);
        let mut waiting: Vec<AllocationId> = due
            .map(|&(j, _)| self.trace.updates[j].gradient)
            .filter(|g| {
                let gradient = &self.trace.allocations[g.index()];
                gradient.category == Category::Gradient
                    && gradient
                        .natural
                        .iter()
                        .any(|&(s, e)| s.index() < p && p <= e.index())
            })
            .collect();
        waiting.sort_unstable();
        waiting.dedup();
        waiting.iter().map(|g| self.bytes(g.index())).sum()
    }

    /// Brings the state of the next update, and what may come ahead.
    fn fetch_state(&mut self) {
        let window = self
            .variant
            .offload_optimizer
            .map_or(0, |away| away.window_bytes.0);
        let all = self.updates.in_order.len();
        for n in (0..all).filter(|_| self.updates.ran == 0) {
            let update = &self.trace.updates[self.updates.in_order[n].0];
            let i = self.updates.in_order[n].0;
            let away = update.state.iter().filter(|&&state| {
                let is_sliced = comes_in_slices(self.trace, self.variant, i, state.index());
                self.is_away(state) && !is_sliced
            });
            self.updates.places[n].1 = away.map(|state| self.bytes(state.index())).sum();
        }
        let now = self.updates.ran;
        let mut own = self.updates.places[now].1;
        if self.updates.places[now].0 == Place::Ahead {
            self.updates.places[now].0 = Place::Away;
        }
        for n in now + 1..self.updates.places.len() {
            let is_there =
                self.updates.places[n].0 == Place::Ahead || self.updates.places[n].1 == 0;
            if !is_there && !self.updates.may_come_ahead(n, window) {
                break;
            }
            self.updates.places[n].0 = Place::Ahead;
        }
        own += self.updates.bytes_at(Place::Ahead) + self.updates.bytes_at(Place::Outgoing);
        self.updates.state_bytes = own;
    }

    /// The next update has run: its state goes out.
    fn send_state(&mut self) {
        let window = self
            .variant
            .offload_optimizer
            .map_or(0, |away| away.window_bytes.0);
        let updates = &mut self.updates;
        let bytes = updates.places[updates.ran].1;
        if bytes > 0 {
            while updates.bytes_at(Place::Outgoing) + bytes > window && updates.settle_oldest() {}
            if bytes <= window {
                updates.places[updates.ran].0 = Place::Outgoing;
            }
        }
        updates.ran += 1;
        if updates.ran == updates.places.len() {
            while updates.settle_oldest() {}
        }
        updates.state_bytes = updates.bytes_at(Place::Ahead) + updates.bytes_at(Place::Outgoing);
        debug_assert!(Bytes(updates.bytes_at(Place::Ahead)) <= Bytes(window));
    }
}
