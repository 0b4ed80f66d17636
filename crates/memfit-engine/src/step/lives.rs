//! Every stretch of memory a transformed step takes, from where to where.
//!
//! Responsible for writing a step out as the requests an allocator sees: each allocation, each copy that a
//! replay makes, each piece of scratch, with the moment it comes and the moment it goes. Not responsible
//! for where they are put ([`crate::placement`], [`crate::allocator`]) nor for choosing what to drop.
//!
//! Invariant: the most bytes alive at once is the peak that [`Evaluator::evaluate`] reports for the same
//! drops; a test holds the two together on random traces.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::model::StepModel;
use super::layout::treatment::Treatment;
use super::offload::updates::{UpdateTurn, update_turns};
use super::sweep::change::Change;
use super::sweep::evaluate::Evaluator;
use crate::bytes::Bytes;
use crate::trace::{AllocationId, Category, Trace};

/// One stretch of memory. Times count changes in the order they happen: at each time exactly one stretch
/// comes or goes, so `start` and `end` of all lives are distinct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// The allocation it holds; absent for scratch inside an op or a replay, and for the room of parameters.
    pub allocation: Option<AllocationId>,
    /// Its bytes, as requested.
    pub bytes: Bytes,
    /// When it comes.
    pub start: u32,
    /// When it goes; [`u32::MAX`] when it is alive after the step.
    pub end: u32,
    /// It is there before the step.
    pub is_resident: bool,
}

/// Place of a change among those of one position; ranks of events are those of `Event::rank`.
const ENDS: u8 = 1;
const UPDATES: u8 = 3;
const STARTS: u8 = 5;
const RUNS: u8 = 6;
const AFTER: u8 = 7;

/// What comes or goes, before it has a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// An allocation as forward made it, or as it stands when no plan can move it.
    Original(usize),
    /// A gradient summed over earlier micro-batches.
    Accumulated(usize),
    /// A version that a replay made.
    Version(usize),
    /// The narrower form of a version.
    Narrow(usize),
    /// Optimizer state that an update brings.
    State {
        update: usize,
        number: usize,
        allocation: usize,
    },
    /// What of the offloaded parameters is in memory, as one.
    Room,
    /// Scratch number so and so.
    Scratch(usize),
}

#[derive(Debug, Clone, Copy)]
struct Turn {
    position: usize,
    rank: u8,
    key: Key,
    comes: bool,
    bytes: u64,
}

/// The lives of a step under `treatments[allocation]`, by start. Empty when they are not valid.
#[must_use]
pub fn lives(trace: &Trace, model: &StepModel, treatments: &[Treatment]) -> Vec<Life> {
    let Some(changes) = Evaluator::new(model).changes(treatments) else {
        return Vec::new();
    };
    let mut script = Script {
        trace,
        model,
        turns: Vec::new(),
        scratch: 0,
        end: model.ground.len(),
    };
    script.constants();
    let after_update = script.updates();
    script.fixed(&after_update);
    script.workspaces();
    script.moved(&changes);
    // Stable: within one position and rank, the order in which the parts above wrote them.
    script.turns.sort_by_key(|turn| (turn.position, turn.rank));
    join(trace, &script.turns)
}

struct Script<'a> {
    trace: &'a Trace,
    model: &'a StepModel,
    turns: Vec<Turn>,
    scratch: usize,
    /// Number of ops that run.
    end: usize,
}

impl Script<'_> {
    fn turn(&mut self, position: usize, rank: u8, key: Key, comes: bool, bytes: u64) {
        self.turns.push(Turn {
            position,
            rank,
            key,
            comes,
            bytes,
        });
    }

    fn scratch(&mut self, position: usize, rank: u8, bytes: u64) {
        if bytes > 0 {
            let key = Key::Scratch(self.scratch);
            self.scratch += 1;
            self.turn(position, rank, key, true, bytes);
            self.turn(position, rank, key, false, bytes);
        }
    }

    /// The room of offloaded parameters, and gradients of earlier micro-batches.
    fn constants(&mut self) {
        if self.model.room_bytes > 0 {
            self.turn(0, 0, Key::Room, true, self.model.room_bytes);
        }
        if !self.model.variant.accumulate {
            return;
        }
        let trace = self.trace;
        let gradients = trace.updates.iter().map(|update| update.gradient.index());
        let distinct: BTreeSet<usize> = gradients
            .filter(|&gradient| trace.allocations[gradient].category == Category::Gradient)
            .collect();
        for gradient in distinct {
            let bytes = self.model.bytes[gradient];
            self.turn(0, 0, Key::Accumulated(gradient), true, bytes);
        }
    }

    /// Updates one by one: each has its temporaries, and its state if that is offloaded; inside
    /// backward it lets its gradient go. Returns the gradients that wait for one, with the position.
    fn updates(&mut self) -> BTreeSet<(usize, usize)> {
        let mut waiting = BTreeSet::new();
        let trace = self.trace;
        let turns = update_turns(trace, self.model.variant);
        let moved = self.model.variant.states_moved(trace);
        for (number, &(at, turn)) in turns.iter().enumerate() {
            let position = at.index();
            match turn {
                UpdateTurn::Fetch(update) | UpdateTurn::Ahead(update) => {
                    self.state(position, update, &moved[update], true);
                }
                UpdateTurn::Settled(update) => {
                    self.state(position, update, &moved[update], false);
                }
                UpdateTurn::Update(update) => {
                    self.scratch(position, UPDATES, self.model.temporary_bytes[update]);
                    let update = &trace.updates[update];
                    let later = turns[number + 1..].iter();
                    let is_last = later.take_while(|later| later.0 == at).all(|later| {
                        !matches!(later.1, UpdateTurn::Update(other)
                            if trace.updates[other].gradient == update.gradient)
                    });
                    let gradient = update.gradient.index();
                    if is_last && self.ends_with_update(gradient, position) {
                        waiting.insert((gradient, position));
                        let bytes = self.model.bytes[gradient];
                        self.turn(position, UPDATES, Key::Original(gradient), false, bytes);
                    }
                }
                UpdateTurn::Asked(_) | UpdateTurn::Out(_) => {}
            }
        }
        waiting
    }

    /// The offloaded state of an update comes or goes.
    fn state(&mut self, position: usize, update: usize, states: &[AllocationId], comes: bool) {
        let model = self.model;
        for (number, state) in states.iter().enumerate() {
            let key = Key::State {
                update,
                number,
                allocation: state.index(),
            };
            self.turn(position, UPDATES, key, comes, model.bytes[state.index()]);
        }
    }

    /// Does the last update of a gradient at this position free it?
    fn ends_with_update(&self, gradient: usize, position: usize) -> bool {
        let ends = |&(start, stop): &(usize, usize)| start < position && stop == position;
        self.model.variant.fuse_optimizer && self.model.fixed_ranges[gradient].iter().any(ends)
    }

    /// What no set of drops can move.
    fn fixed(&mut self, after_update: &BTreeSet<(usize, usize)>) {
        for (allocation, ranges) in self.model.fixed_ranges.iter().enumerate() {
            let bytes = self.model.bytes[allocation];
            let key = Key::Original(allocation);
            for &(start, stop) in ranges {
                self.turns.push(Turn {
                    position: start,
                    rank: STARTS,
                    key,
                    comes: true,
                    bytes,
                });
                if stop <= self.end && !after_update.contains(&(allocation, stop)) {
                    self.turns.push(Turn {
                        position: stop,
                        rank: ENDS,
                        key,
                        comes: false,
                        bytes,
                    });
                }
            }
        }
    }

    fn workspaces(&mut self) {
        for position in 0..self.end {
            let bytes = self.trace.ops[position].workspace_bytes.0;
            self.scratch(position, RUNS, bytes);
        }
    }

    /// What the drops decide, as the sweep saw it.
    fn moved(&mut self, changes: &[Change]) {
        // A storage that passes from version to version keeps the name of the version that made it.
        let mut named: BTreeMap<usize, usize> = BTreeMap::new();
        for change in changes {
            let (position, rank) = change.at();
            // What a record pins, it pins once its op has run.
            let rank = if rank == RUNS { AFTER } else { rank };
            match *change {
                Change::Held { allocation, .. } => {
                    let bytes = self.model.bytes[allocation];
                    self.turn(position, rank, Key::Original(allocation), true, bytes);
                }
                Change::LetGo { allocation, .. } => {
                    let bytes = self.model.bytes[allocation];
                    self.turn(position, rank, Key::Original(allocation), false, bytes);
                }
                Change::Made { slot, bytes, .. } => {
                    named.insert(slot, slot);
                    self.turn(position, rank, Key::Version(slot), true, bytes);
                }
                Change::Passed { from, .. } => {
                    let name = named.remove(&from).unwrap_or(from);
                    named.insert(from + 1, name);
                }
                Change::Gone { slot, bytes, .. } => {
                    let name = named.remove(&slot).unwrap_or(slot);
                    self.turn(position, rank, Key::Version(name), false, bytes);
                }
                Change::Narrow {
                    slot, bytes, comes, ..
                } => self.turn(position, rank, Key::Narrow(slot), comes, bytes),
                Change::Scratch { bytes, .. } => self.scratch(position, rank, bytes),
            }
        }
    }
}

/// Joins what comes with what goes.
fn join(trace: &Trace, turns: &[Turn]) -> Vec<Life> {
    let mut lives: Vec<Life> = Vec::with_capacity(turns.len() / 2 + 1);
    let mut open: BTreeMap<Key, usize> = BTreeMap::new();
    for (time, turn) in turns.iter().enumerate() {
        let time = u32::try_from(time).unwrap_or(u32::MAX - 1);
        if !turn.comes {
            if let Some(life) = open.remove(&turn.key) {
                lives[life].end = time;
            }
            continue;
        }
        open.insert(turn.key, lives.len());
        let id = |allocation: usize| AllocationId(u32::try_from(allocation).unwrap_or(u32::MAX));
        lives.push(Life {
            allocation: match turn.key {
                Key::Original(allocation)
                | Key::Accumulated(allocation)
                | Key::State { allocation, .. } => Some(id(allocation)),
                Key::Version(_) | Key::Narrow(_) | Key::Room | Key::Scratch(_) => None,
            },
            bytes: Bytes(turn.bytes),
            start: time,
            end: u32::MAX,
            is_resident: match turn.key {
                Key::Original(allocation) => {
                    turn.position == 0 && trace.allocations[allocation].producer.is_none()
                }
                Key::Accumulated(_) | Key::Room => true,
                Key::Version(_) | Key::Narrow(_) | Key::State { .. } | Key::Scratch(_) => false,
            },
        });
    }
    lives.retain(|life| life.bytes > Bytes::ZERO);
    lives
}

/// The most bytes alive at once.
#[must_use]
pub fn highest(lives: &[Life]) -> Bytes {
    let mut changes: Vec<(u32, bool, u64)> = Vec::with_capacity(2 * lives.len());
    for life in lives {
        changes.push((life.start, true, life.bytes.0));
        changes.push((life.end, false, life.bytes.0));
    }
    changes.sort_unstable();
    let (mut live, mut highest) = (0u64, 0u64);
    for (_, comes, bytes) in changes {
        if comes {
            live = live.saturating_add(bytes);
            highest = highest.max(live);
        } else {
            live = live.saturating_sub(bytes);
        }
    }
    Bytes(highest)
}
