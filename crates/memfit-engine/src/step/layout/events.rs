//! The events of a step in order, and the ground below them.
//!
//! Responsible for turning ranges and saved tensors into events that a sweep applies one by one, for
//! summing what no set of drops can move, and for collapsing ops between events into stretches. Part of
//! laying out a [`StepModel`]; not responsible for what may be dropped.

use std::collections::{BTreeSet, HashMap};

use super::event::Event;
use super::model::StepModel;
use crate::step::offload::updates::{UpdateTurn, bytes_of, update_turns, updates_end};
use crate::trace::{Category, OpIndex, Trace};

impl StepModel {
    pub(super) fn lay_out_events(&mut self, trace: &Trace) {
        // With updates one by one the optimizer's phase is empty, so the step ends where it would start.
        let one_by_one = self.variant.updates_one_by_one();
        let end = if one_by_one {
            updates_end(trace, self.variant)
        } else {
            trace.ops.len()
        };
        // The last gradient may be complete at the end itself: what lives on is still alive there.
        let last = end + 1;
        let cuts = self.natural_cuts(trace);
        let mut events: Vec<(usize, Event)> = vec![(self.forward_end, Event::ForwardEnd)];
        for (i, saved) in trace.saved.iter().enumerate() {
            let value = &trace.values[saved.value.index()];
            let allocation = value.allocation.index();
            self.saved
                .push((allocation, self.slot(allocation, value.version)));
            if !self.mobile[allocation] {
                self.fixed_ranges[allocation].push((saved.pack.index(), saved.release.index()));
                continue;
            }
            events.push((saved.pack.index(), Event::Pack(i)));
            events.push((saved.release.index(), Event::Release(i)));
            if let Some(unpack) = saved.unpack {
                events.push((unpack.index(), Event::Unpack(i)));
            }
        }
        let opened = opened_in_backward(trace);
        for (i, allocation) in trace.allocations.iter().enumerate() {
            for &(start, stop) in &allocation.natural {
                let (start, stop) = (start.index(), stop.index().min(cuts[i]).min(last));
                if start >= stop {
                    continue;
                }
                if !self.mobile[i] {
                    self.fixed_ranges[i].push((start, stop));
                    continue;
                }
                let slot = self.backward_slot(&opened, i, start);
                events.push((
                    start,
                    Event::Start {
                        allocation: i,
                        slot,
                    },
                ));
                events.push((
                    stop,
                    Event::End {
                        allocation: i,
                        slot,
                    },
                ));
            }
        }
        self.lay_out_ground(trace, end);
        if one_by_one {
            events.extend(self.update_events(trace, &cuts));
        }
        self.lay_out_runs(&mut events, end);
        events.sort_by_key(|&(position, event)| (position, event.rank(), event));
        self.events = events;
    }

    /// Where each allocation stops being needed under this variant: a gradient once it is used or added up,
    /// the state of an update at once, for it comes with the update.
    fn natural_cuts(&self, trace: &Trace) -> Vec<usize> {
        let mut cuts = vec![usize::MAX; trace.allocations.len()];
        if self.variant.fuse_optimizer || self.variant.accumulate {
            for update in &trace.updates {
                let gradient = update.gradient.index();
                if trace.allocations[gradient].category == Category::Gradient {
                    cuts[gradient] = update.ready.index();
                }
            }
        }
        if let Some(away) = self.variant.offload_optimizer {
            for state in trace
                .updates
                .iter()
                .flat_map(|update| away.of(trace, update))
            {
                cuts[state.index()] = 0;
            }
        }
        cuts
    }

    fn lay_out_ground(&mut self, trace: &Trace, end: usize) {
        let mut constant: u64 = self.room_bytes;
        if self.variant.accumulate {
            let mut seen = vec![false; trace.allocations.len()];
            for update in &trace.updates {
                let gradient = update.gradient.index();
                let is_gradient = trace.allocations[gradient].category == Category::Gradient;
                if is_gradient && !std::mem::replace(&mut seen[gradient], true) {
                    constant = constant.saturating_add(self.bytes[gradient]);
                }
            }
        }
        let mut during = Heights::new(end);
        let mut between = Heights::new(end + 1);
        for (allocation, ranges) in self.fixed_ranges.iter_mut().enumerate() {
            merge(ranges);
            for &(start, stop) in ranges.iter() {
                during.add(start, stop, self.bytes[allocation]);
                // Just before op `p`: what started before it and has not ended.
                between.add(start + 1, stop, self.bytes[allocation]);
            }
        }
        let workspace = trace.ops.iter().map(|op| op.workspace_bytes.0);
        let during = during.sums(constant);
        self.ground = during
            .into_iter()
            .zip(workspace)
            .map(|(g, w)| g.saturating_add(w))
            .collect();
        self.ground_between = between.sums(constant);
    }

    /// One event for each position at which parameters are updated. Each update sees its own temporaries and
    /// the state that is there; inside backward also the gradients that still wait for theirs, and it frees its
    /// gradient. State that stays for later updates, or is still on its way out, is part of the ground from there on.
    fn update_events(&mut self, trace: &Trace, cuts: &[usize]) -> Vec<(usize, Event)> {
        let turns = update_turns(trace, self.variant);
        let moved: Vec<u64> = {
            let states = self.variant.states_moved(trace).into_iter();
            let sizes = states.map(|states| bytes_of(trace, &states).0);
            sizes.collect()
        };
        let by_position: Vec<_> = turns.chunk_by(|a, b| a.0 == b.0).collect();
        let mut events = Vec::with_capacity(by_position.len());
        let mut state: u64 = 0;
        for (number, &turns) in by_position.iter().enumerate() {
            let position = turns[0].0.index();
            let ground = self.ground_between.get(position).copied().unwrap_or(0);
            let height =
                ground.saturating_add(self.update_height(trace, cuts, (turns, &moved), &mut state));
            events.push((position, Event::Update { height }));
            let next = by_position.get(number + 1);
            let until = next.map_or(self.ground.len(), |turns| turns[0].0.index());
            for ground in [&mut self.ground, &mut self.ground_between] {
                let until = until.min(ground.len());
                for height in ground.get_mut(position..until).into_iter().flatten() {
                    *height = height.saturating_add(state);
                }
            }
        }
        events
    }

    /// The most that the turns of one position reach above the ground, with bytes of the state that each update moves;
    /// `state` is what of it is there before them, and after them.
    fn update_height(
        &self,
        trace: &Trace,
        cuts: &[usize],
        (turns, moved): (&[(OpIndex, UpdateTurn)], &[u64]),
        state: &mut u64,
    ) -> u64 {
        let waiting = self.waiting_gradients(trace, cuts, turns);
        let (mut highest, mut place) = (0, 0);
        for &(_, turn) in turns {
            match turn {
                UpdateTurn::Fetch(update) | UpdateTurn::Ahead(update) => {
                    *state = state.saturating_add(moved[update]);
                }
                UpdateTurn::Settled(update) => *state = state.saturating_sub(moved[update]),
                UpdateTurn::Update(update) => {
                    let own = self.temporary_bytes[update];
                    let there = waiting[place].saturating_add(*state);
                    highest = highest.max(there.saturating_add(own));
                    place += 1;
                }
                UpdateTurn::Asked(_) | UpdateTurn::Out(_) => {}
            }
        }
        highest
    }

    /// Bytes of gradients complete at this position that wait for each of its updates, its own included.
    fn waiting_gradients(
        &self,
        trace: &Trace,
        cuts: &[usize],
        turns: &[(OpIndex, UpdateTurn)],
    ) -> Vec<u64> {
        let mut counted: BTreeSet<usize> = BTreeSet::new();
        let mut bytes: u64 = 0;
        let mut waiting = Vec::new();
        for &(at, turn) in turns.iter().rev() {
            let UpdateTurn::Update(update) = turn else {
                continue;
            };
            let (gradient, position) = (trace.updates[update].gradient.index(), at.index());
            let alive = |&(start, end): &(OpIndex, OpIndex)| {
                start.index() < position && position <= end.index()
            };
            let held = self.variant.fuse_optimizer
                && cuts[gradient] == position
                && trace.allocations[gradient].natural.iter().any(alive);
            if held && counted.insert(gradient) {
                bytes = bytes.saturating_add(self.bytes[gradient]);
            }
            waiting.push(bytes);
        }
        waiting.reverse();
        waiting
    }

    /// Ops that make no slot and have no event of their own join the stretch before them.
    fn lay_out_runs(&self, events: &mut Vec<(usize, Event)>, end: usize) {
        let mut busy = vec![false; end + 1];
        for &(position, _) in events.iter().filter(|(position, _)| *position < end) {
            busy[position] = true;
        }
        for (op, record) in self.records.iter().enumerate() {
            if !record.makes.is_empty() {
                // A record exists once its op has run, so the next op starts a stretch of its own.
                busy[op] = true;
                busy[op + 1] = true;
            }
        }
        let mut from = 0;
        while from < end {
            let until = (from + 1..end).find(|&op| busy[op]).unwrap_or(end);
            let highest = (from..until)
                .rev()
                .max_by_key(|&op| self.ground[op])
                .unwrap_or(from);
            events.push((from, Event::Run { until, highest }));
            from = until;
        }
    }

    /// A natural range that starts in backward on an allocation of forward was opened by an unpack:
    /// the slot it holds.
    fn backward_slot(&self, opened: &Opened, allocation: usize, start: usize) -> Option<usize> {
        let slots = self.slots_of(allocation);
        if slots.is_empty() || start < self.forward_end {
            return None;
        }
        let version = opened.get(&(start, allocation));
        version
            .and_then(|&version| self.slot(allocation, version))
            .or(Some(slots.end - 1))
    }
}

/// The version that an unpack asks for, by its op and the allocation.
type Opened = HashMap<(usize, usize), u32>;

fn opened_in_backward(trace: &Trace) -> Opened {
    let mut opened = Opened::new();
    for saved in &trace.saved {
        let value = &trace.values[saved.value.index()];
        if let Some(unpack) = saved.unpack {
            let key = (unpack.index(), value.allocation.index());
            opened.entry(key).or_insert(value.version);
        }
    }
    opened
}

/// Sums over half-open ranges, by differences.
struct Heights(Vec<i128>);

impl Heights {
    fn new(length: usize) -> Self {
        Self(vec![0; length + 1])
    }

    fn add(&mut self, start: usize, stop: usize, bytes: u64) {
        let last = self.0.len() - 1;
        if start < stop.min(last) {
            self.0[start] += i128::from(bytes);
            self.0[stop.min(last)] -= i128::from(bytes);
        }
    }

    fn sums(mut self, constant: u64) -> Vec<u64> {
        self.0.pop();
        let mut height = i128::from(constant);
        let sum = |rise: i128| {
            height += rise;
            u64::try_from(height).unwrap_or(u64::MAX)
        };
        self.0.into_iter().map(sum).collect()
    }
}

/// Sorts ranges and joins those that overlap or touch.
fn merge(ranges: &mut Vec<(usize, usize)>) {
    ranges.retain(|&(start, end)| start < end);
    ranges.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::with_capacity(ranges.len());
    for &(start, end) in ranges.iter() {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    *ranges = merged;
}
