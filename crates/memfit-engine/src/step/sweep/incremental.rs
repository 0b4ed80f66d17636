//! The peak of a transformed trace whose treatments differ little from others that were swept.
//!
//! Responsible for what a search asks thousands of times: the same as [`Evaluator`], without sweeping again what goes
//! as before. Not responsible for the sweep itself (`evaluate.rs`, `state.rs`).
//!
//! # How
//!
//! The events are cut into sections. One sweep, the *base*, is remembered section by section: which counters a section
//! touched and what they were after it, its looks at the height, what it replayed. A section does the same again if
//! all that it touched is the same when it begins, treatments included. So other treatments are swept only in sections
//! that touch an allocation treated otherwise, or a counter that differs from the base by then; in between, the
//! counters are set to what the base says, and heights are its own, higher or lower by a constant.
//! What was swept so becomes the base when the search goes on from there.
//!
//! # Invariant
//!
//! Every answer is what [`Evaluator`] says, the number of events swept until it was known included.

use super::column::Column;
use super::evaluate::{Evaluation, Evaluator, Holding};
use super::state::{Holders, Look, RecordState, SlotState, State};
use super::traffic::{Lines, Touched, Transfer};
use crate::bytes::Bytes;
use crate::step::layout::event::Event;
use crate::step::layout::model::StepModel;
use crate::step::layout::treatment::Treatment;
use crate::trace::OpIndex;

/// Sections of a step: the bits of a [`Sections`].
const SECTIONS: usize = 128;
/// A set of sections, by bits.
type Sections = u128;
/// With more sections than this to sweep, all are: following what differs would cost more than it saves.
const MANY: u32 = 80;

/// Sweeps one model again and again.
#[derive(Debug)]
pub struct IncrementalEvaluator<'m> {
    evaluator: Evaluator<'m>,
    /// Sums of bytes are far from what 64 bits hold.
    is_exact: bool,
    base: Base,
    last: Last,
    /// Sections to be used again.
    spare: Vec<Section>,
    swept: usize,
}

/// What is remembered as a whole.
#[derive(Debug, Default)]
struct Base {
    /// Empty before any.
    treatments: Vec<Treatment>,
    /// Treatments with a home among them.
    homes: usize,
    sections: Vec<Section>,
    holders: Followed<Holders>,
    slots: Followed<SlotState>,
    records: Followed<RecordState>,
    looked_at: LookedAt,
    /// What is on its way as far as the evaluation at hand has come.
    lines: Lines,
}

/// Which sections look at what is on its way out, and at what was fetched ahead.
#[derive(Debug, Default, Clone, Copy)]
struct LookedAt {
    out: Sections,
    ahead: Sections,
}

impl LookedAt {
    fn set(&mut self, section: usize, touched: Touched) {
        let bit = 1 << section;
        self.out = self.out & !bit | if touched.out { bit } else { 0 };
        self.ahead = self.ahead & !bit | if touched.ahead { bit } else { 0 };
    }

    /// Sections that look at something that differs.
    fn needed(self, lines: &Lines, base: &Lines) -> Sections {
        let out = if lines.out == base.out { 0 } else { self.out };
        let ahead = if lines.ahead == base.ahead {
            0
        } else {
            self.ahead
        };
        out | ahead
    }
}

/// The evaluation before this one, as it differs from the base.
#[derive(Debug, Default)]
struct Last {
    /// It was swept to its end and is valid, so that it can become the base.
    is_whole: bool,
    changes: Vec<(usize, Treatment)>,
    homes: usize,
    /// Ascending.
    sections: Vec<(usize, Section)>,
    /// Where the peak is: section, and number of the look in it.
    peak_look: Option<(usize, usize)>,
}

/// What one section does.
#[derive(Debug, Default)]
struct Section {
    looks: Vec<Look>,
    /// The first of the highest.
    highest: usize,
    /// What is alive after it, more than before it.
    live: i64,
    replayed: Vec<usize>,
    holders: Log<Holders>,
    slots: Log<SlotState>,
    records: Log<RecordState>,
    transfers: Vec<Transfer>,
    /// Which of what is on its way it looked at, and that after it.
    touched: Touched,
    lines: Lines,
}

/// What one section touches of a column.
#[derive(Debug, Default)]
struct Log<T> {
    /// Changed, with the value after it.
    changed: Vec<(u32, T)>,
    read: Vec<u32>,
}

/// A column of the base, and what differs from it.
#[derive(Debug, Default)]
struct Followed<T> {
    /// Which sections touch each.
    sections: Vec<Sections>,
    /// Those that may differ now.
    differing: Vec<u32>,
    differs: Vec<bool>,
    /// What the base has where that differs.
    base: Vec<T>,
    /// Marks those that the base changes in the section at hand.
    marks: Vec<u32>,
    mark: u32,
}

impl<T: Copy + Default + PartialEq> Followed<T> {
    /// Nothing differs.
    fn start(&mut self, length: usize) {
        for &index in &self.differing {
            self.differs[index as usize] = false;
        }
        self.differing.clear();
        self.sections.resize(length, 0);
        self.differs.resize(length, false);
        self.base.resize(length, T::default());
        self.marks.resize(length, 0);
    }

    /// After a section: what differs now.
    #[inline]
    fn follow(&mut self, column: &Column<T>, base: &Log<T>) {
        self.mark = self.mark.wrapping_add(1);
        if self.mark == 0 {
            self.marks.fill(0);
            self.mark = 1;
        }
        for &(index, after) in &base.changed {
            self.marks[index as usize] = self.mark;
            self.compare(column, index, after);
        }
        for &(index, before) in column.touched() {
            if self.marks[index as usize] != self.mark {
                let known = self.differs[index as usize];
                let base = if known {
                    self.base[index as usize]
                } else {
                    before
                };
                self.compare(column, index, base);
            }
        }
        let differs = &self.differs;
        self.differing.retain(|&index| differs[index as usize]);
    }

    #[inline]
    fn compare(&mut self, column: &Column<T>, index: u32, base: T) {
        let place = index as usize;
        self.base[place] = base;
        let differs = *column.peek(place) != base;
        if differs && !self.differs[place] {
            self.differing.push(index);
        }
        self.differs[place] = differs;
    }

    /// Sections that touch something that differs.
    fn needed(&self) -> Sections {
        let touching = self.differing.iter();
        touching.fold(0, |all, &index| all | self.sections[index as usize])
    }

    fn forget(&mut self, section: usize, log: &Log<T>) {
        for index in log.touched() {
            self.sections[index as usize] &= !(1 << section);
        }
    }

    fn know(&mut self, section: usize, log: &Log<T>) {
        for index in log.touched() {
            self.sections[index as usize] |= 1 << section;
        }
    }
}

impl<T: Copy + Default + PartialEq> Log<T> {
    #[inline]
    fn touched(&self) -> impl Iterator<Item = u32> + '_ {
        let changed = self.changed.iter().map(|&(index, _)| index);
        changed.chain(self.read.iter().copied())
    }

    #[inline]
    fn write(&mut self, column: &Column<T>) {
        self.changed.clear();
        self.read.clear();
        for &(index, before) in column.touched() {
            let now = *column.peek(index as usize);
            if now == before {
                self.read.push(index);
            } else {
                self.changed.push((index, now));
            }
        }
    }

    #[inline]
    fn repeat(&self, column: &mut Column<T>) {
        for &(index, after) in &self.changed {
            column.set(index, after);
        }
    }
}

impl Section {
    /// Sets all that it changes to what that is after it.
    fn repeat(&self, state: &mut State) {
        self.holders.repeat(&mut state.holders);
        self.slots.repeat(&mut state.slots);
        self.records.repeat(&mut state.records);
        self.repeat_lines(state.traffic.lines_mut());
    }

    fn repeat_lines(&self, lines: &mut Lines) {
        if self.touched.out {
            lines.out.clone_from(&self.lines.out);
        }
        if self.touched.ahead {
            lines.ahead = self.lines.ahead;
        }
    }
}

impl Last {
    /// All sections, in order.
    fn sections<'s>(&'s self, base: &'s Base) -> impl Iterator<Item = &'s Section> {
        let mut swept = self.sections.iter().peekable();
        (0..SECTIONS).map(
            move |number| match swept.next_if(|(own, _)| *own == number) {
                Some((_, section)) => section,
                None => &base.sections[number],
            },
        )
    }
}

impl<'m> IncrementalEvaluator<'m> {
    /// One for `model`, which knows nothing yet.
    #[must_use]
    pub fn new(model: &'m StepModel) -> Self {
        let sizes = model.bytes.iter().map(|&bytes| u128::from(bytes));
        let records = model.records.iter();
        let workspaces = records.map(|record| u128::from(record.workspace));
        let ground = model.ground.iter().chain(&model.ground_between);
        let ground = u128::from(ground.copied().max().unwrap_or(0));
        let updates = model.events.iter().map(|&(_, event)| match event {
            Event::Update { height } => u128::from(height),
            _ => 0,
        });
        // A version of an allocation is there once as it was, once computed again, and once narrower.
        let versions: u128 = model
            .slots
            .iter()
            .map(|slot| u128::from(model.bytes[slot.allocation]))
            .sum();
        let most = sizes.sum::<u128>() + 3 * versions + workspaces.sum::<u128>() + ground;
        let most = most + updates.max().unwrap_or(0);
        Self {
            evaluator: Evaluator::new(model),
            is_exact: most < 1 << 62,
            base: Base::default(),
            last: Last::default(),
            spare: Vec::new(),
            swept: 0,
        }
    }

    /// As [`Evaluator::evaluate_within`].
    pub fn evaluate_within(&mut self, treatments: &[Treatment], limit: Bytes) -> Evaluation {
        let model = self.evaluator.model;
        if !self.is_exact || treatments.len() != model.bytes.len() {
            return self.evaluate_anew(treatments, limit);
        }
        let mut changes = std::mem::take(&mut self.last.changes);
        if self.last.is_whole && self.goes_on(treatments, &changes) {
            self.commit(&changes);
        }
        self.retire();
        changes.clear();
        if self.base.treatments.is_empty() {
            changes.extend(treatments.iter().copied().enumerate());
        } else {
            // A loop: a chain of iterators was compiled to a call for each allocation.
            for (allocation, (known, new)) in
                self.base.treatments.iter().zip(treatments).enumerate()
            {
                if known != new {
                    changes.push((allocation, *new));
                }
            }
        }
        self.last.changes = changes;
        self.evaluate_changes(treatments, limit)
    }

    /// By a sweep of its own.
    fn evaluate_anew(&mut self, treatments: &[Treatment], limit: Bytes) -> Evaluation {
        self.last.is_whole = false;
        let evaluation = self.evaluator.evaluate_within(treatments, limit);
        self.swept = self.evaluator.swept();
        evaluation
    }

    /// Do the treatments go on from the last ones rather than from the base?
    fn goes_on(&self, treatments: &[Treatment], changes: &[(usize, Treatment)]) -> bool {
        let same = changes
            .iter()
            .filter(|&&(allocation, treatment)| treatments[allocation] == treatment);
        self.base.treatments.is_empty() || 2 * same.count() > changes.len()
    }

    /// Makes the last evaluation the base.
    fn commit(&mut self, changes: &[(usize, Treatment)]) {
        let base = &mut self.base;
        base.treatments
            .resize(self.evaluator.model.bytes.len(), Treatment::Keep);
        base.sections.resize_with(SECTIONS, Section::default);
        for &(allocation, treatment) in changes {
            base.treatments[allocation] = treatment;
        }
        base.homes = self.last.homes;
        for (number, section) in self.last.sections.drain(..) {
            let old = std::mem::replace(&mut base.sections[number], section);
            let new = &base.sections[number];
            base.holders.forget(number, &old.holders);
            base.slots.forget(number, &old.slots);
            base.records.forget(number, &old.records);
            base.holders.know(number, &new.holders);
            base.slots.know(number, &new.slots);
            base.records.know(number, &new.records);
            base.looked_at.set(number, new.touched);
            self.spare.push(old);
        }
    }

    fn retire(&mut self) {
        let sections = self.last.sections.drain(..);
        self.spare.extend(sections.map(|(_, section)| section));
    }

    /// Sweeps what [`Last::changes`] make different.
    fn evaluate_changes(&mut self, treatments: &[Treatment], limit: Bytes) -> Evaluation {
        let (model, base) = (self.evaluator.model, &mut self.base);
        let has_base = !base.treatments.is_empty();
        let mut homes = if has_base { base.homes } else { 0 };
        let is_home = |treatment: Treatment| usize::from(treatment.home() != Treatment::NO_HOME);
        let mut is_allowed = true;
        base.holders.start(model.bytes.len());
        base.slots.start(model.slots.len());
        base.records.start(model.records.len());
        base.lines = Lines::default();
        let mut changed: Sections = 0;
        for &(allocation, treatment) in &self.last.changes {
            homes += is_home(treatment);
            if has_base {
                homes -= is_home(base.treatments[allocation]);
            }
            is_allowed &= is_allowed && model.allows(allocation, treatment);
            changed |= base.holders.sections[allocation];
        }
        self.last.homes = homes;
        self.last.is_whole = false;
        self.last.peak_look = None;
        self.evaluator.reset();
        let state = &mut self.evaluator.state;
        state.has_homes = homes > 0;
        state.limit = limit.0;
        state.valid = is_allowed;
        self.swept = 0;
        if is_allowed {
            state.watch(true);
            let is_whole = self.run(
                treatments,
                if has_base { changed } else { Sections::MAX },
                limit,
            );
            self.last.is_whole = is_whole && self.evaluator.state.valid;
        }
        self.evaluator.found()
    }

    /// Goes through all sections, `changed` of which are to be swept in any case; false where the height rises above
    /// `limit`.
    fn run(&mut self, treatments: &[Treatment], changed: Sections, limit: Bytes) -> bool {
        let mut needed = changed;
        for number in 0..SECTIONS {
            if needed.count_ones() > MANY {
                needed = Sections::MAX;
            }
            if needed >> number & 1 == 1 {
                if !self.sweep(treatments, number) {
                    return false;
                }
                if needed != Sections::MAX {
                    let (base, state) = (&mut self.base, &self.evaluator.state);
                    let section = &base.sections[number];
                    section.repeat_lines(&mut base.lines);
                    base.holders.follow(&state.holders, &section.holders);
                    base.slots.follow(&state.slots, &section.slots);
                    base.records.follow(&state.records, &section.records);
                    needed = changed
                        | base.holders.needed()
                        | base.slots.needed()
                        | base.records.needed()
                        | base.looked_at.needed(state.traffic.lines(), &base.lines);
                }
            } else if !self.skip(number, limit, needed >> number != 0) {
                return false;
            }
        }
        self.swept = self.evaluator.model.events.len();
        true
    }

    fn bounds(&self, number: usize) -> (usize, usize) {
        let count = self.evaluator.model.events.len();
        (count * number / SECTIONS, count * (number + 1) / SECTIONS)
    }

    /// Sweeps a section and remembers it; false where the sweep stops.
    fn sweep(&mut self, treatments: &[Treatment], number: usize) -> bool {
        let mut section = self.spare.pop().unwrap_or_default();
        let (from, until) = self.bounds(number);
        let model = self.evaluator.model;
        let state = &mut self.evaluator.state;
        state.holders.start_section();
        state.slots.start_section();
        state.records.start_section();
        section.looks.clear();
        state.looks = Some(std::mem::take(&mut section.looks));
        state.traffic.touched = Touched::default();
        state.live_before = state.live;
        state.transfers_before = state.traffic.transfers.len();
        state.replays_before = state.replayed.len();
        let peak = state.peak_tick;
        let tick = state.tick;
        for (index, &(position, event)) in model.events[from..until].iter().enumerate() {
            self.evaluator.state.event = from + index;
            self.evaluator.apply(treatments, position, event);
            if event.looks() && self.evaluator.state.stopped() {
                self.swept = from + index + 1;
                section.looks = self.evaluator.state.looks.take().unwrap_or_default();
                self.spare.push(section);
                return false;
            }
        }
        let state = &mut self.evaluator.state;
        section.looks = state.looks.take().unwrap_or_default();
        section.highest = highest(&section.looks);
        section.live = state.live.wrapping_sub(state.live_before).cast_signed();
        section.replayed.clear();
        section
            .replayed
            .extend(&state.replayed[state.replays_before..]);
        section.transfers.clear();
        let transfers = &state.traffic.transfers[state.transfers_before..];
        section.transfers.extend(transfers);
        section.touched = state.traffic.touched;
        if section.touched != Touched::default() {
            section.lines.clone_from(state.traffic.lines());
        }
        section.holders.write(&state.holders);
        section.slots.write(&state.slots);
        section.records.write(&state.records);
        if state.peak_tick != peak {
            let look = usize::try_from(state.peak_tick - tick - 1).unwrap_or(usize::MAX);
            self.last.peak_look = Some((number, look));
        }
        self.last.sections.push((number, section));
        true
    }

    /// Takes a section from the base; false where the height rises above `limit` in it. `goes_on` where another will
    /// be swept.
    fn skip(&mut self, number: usize, limit: Bytes, goes_on: bool) -> bool {
        let section = &self.base.sections[number];
        let state = &mut self.evaluator.state;
        let height = |look: &Look| state.live.wrapping_add_signed(look.height);
        if let Some(look) = section.looks.get(section.highest) {
            let top = height(look);
            if top > limit.0 {
                let above = |look: &&Look| height(look) > limit.0;
                let first = section.looks.iter().find(above).unwrap_or(look);
                state.peak = height(first);
                state.peak_at = Some(first.at);
                state
                    .replayed
                    .extend(&section.replayed[..first.replays as usize]);
                let transfers = &section.transfers[..first.transfers as usize];
                state.traffic.transfers.extend(transfers);
                self.swept = first.event as usize + 1;
                return false;
            }
            if top > state.peak {
                state.peak = top;
                state.peak_at = Some(look.at);
                self.last.peak_look = Some((number, section.highest));
            }
        }
        state.replayed.extend(&section.replayed);
        state.traffic.transfers.extend(&section.transfers);
        state.live = state.live.wrapping_add_signed(section.live);
        if goes_on {
            section.repeat(state);
            section.repeat_lines(&mut self.base.lines);
        }
        true
    }

    /// As [`Evaluator::swept`]: events that a sweep would have touched until the answer was known.
    #[must_use]
    pub const fn swept(&self) -> usize {
        self.swept
    }

    /// Sections swept for the last answer.
    #[cfg(test)]
    pub(in crate::step) fn sections_swept(&self) -> (usize, usize) {
        (self.last.sections.len(), SECTIONS)
    }

    /// As [`Evaluator::replayed`].
    pub fn replayed(&self) -> impl Iterator<Item = OpIndex> + '_ {
        self.evaluator.replayed()
    }

    /// As [`Evaluator::transfers`].
    #[must_use]
    pub fn transfers(&self) -> &[Transfer] {
        self.evaluator.transfers()
    }

    /// As [`Evaluator::holdings_at_peak`].
    pub fn holdings_at_peak(&mut self, treatments: &[Treatment]) -> Vec<Holding> {
        self.evaluate_within(treatments, Bytes(u64::MAX));
        let Some((number, look)) = self.last.peak_look.filter(|_| self.last.is_whole) else {
            return self.evaluator.holdings_at_peak(treatments);
        };
        let (from, until) = self.bounds(number);
        let (base, last, evaluator) = (&self.base, &self.last, &mut self.evaluator);
        let (peak_at, has_homes) = (evaluator.state.peak_at, evaluator.state.has_homes);
        evaluator.reset();
        for section in last.sections(base).take(number) {
            section.repeat(&mut evaluator.state);
        }
        evaluator.state.has_homes = has_homes;
        evaluator.state.stop_tick = look as u64 + 1;
        for &(position, event) in &evaluator.model.events[from..until] {
            evaluator.apply(treatments, position, event);
            if event.looks() && evaluator.state.stopped() {
                break;
            }
        }
        evaluator.state.peak_at = peak_at;
        evaluator.holdings(treatments)
    }

    /// As [`Evaluator::timeline`].
    pub fn timeline(&mut self, treatments: &[Treatment]) -> Vec<Bytes> {
        self.evaluate_within(treatments, Bytes(u64::MAX));
        if !self.last.is_whole {
            return self.evaluator.timeline(treatments);
        }
        let model = self.evaluator.model;
        let mut heights = vec![Bytes::ZERO; model.ground.len()];
        let last = heights.len().saturating_sub(1);
        let mut live: u64 = 0;
        for section in self.last.sections(&self.base) {
            for look in &section.looks {
                let height = live.wrapping_add_signed(look.height);
                let (position, event) = model.events[look.event as usize];
                if let Event::Run { until, highest } = event {
                    let Some(live) = height.checked_sub(model.ground[highest]) else {
                        // As a trace may have it, more is let go of than is there: what is counted from nothing on
                        // does not add up from section to section.
                        return self.evaluator.timeline(treatments);
                    };
                    let stretch = heights[position..until].iter_mut();
                    for (height, &ground) in stretch.zip(&model.ground[position..until]) {
                        *height = (*height).max(Bytes(live.saturating_add(ground)));
                    }
                } else if let Some(known) = heights.get_mut(position.min(last)) {
                    *known = (*known).max(Bytes(height));
                }
            }
            live = live.wrapping_add_signed(section.live);
        }
        heights
    }
}

/// The first of the highest looks.
fn highest(looks: &[Look]) -> usize {
    let mut highest = 0;
    for (number, look) in looks.iter().enumerate() {
        if look.height > looks[highest].height {
            highest = number;
        }
    }
    highest
}
