//! Stored allocations: out in forward, back in backward.
//!
//! Responsible for the queue of what is on its way out, for fetches, for what is fetched ahead, and for
//! the list of it all. Part of the sweep (`evaluate.rs`); who refers to what is counted in `state.rs`.

use std::collections::VecDeque;

use super::evaluate::Change;
use super::model::{StepModel, op_index};
use super::state::{Hold, State};
use super::treatment::Treatment;
use crate::trace::{AllocationId, OpIndex};

/// One thing that happened to a stored allocation, at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Its write began.
    Out {
        /// Position.
        at: OpIndex,
        /// What is written.
        allocation: AllocationId,
    },
    /// Its write must have ended: the step waits for it here.
    Settled {
        /// Position.
        at: OpIndex,
        /// What was written.
        allocation: AllocationId,
    },
    /// It is fetched, and waited for at once.
    Fetch {
        /// Position.
        at: OpIndex,
        /// What is fetched.
        allocation: AllocationId,
    },
    /// Its fetch begins, before anything asks for it.
    Ahead {
        /// Position.
        at: OpIndex,
        /// What is fetched.
        allocation: AllocationId,
    },
    /// It was fetched ahead and is asked for: the step waits for its fetch here.
    Asked {
        /// Position.
        at: OpIndex,
        /// What was fetched.
        allocation: AllocationId,
    },
}

/// What a sweep knows of stored allocations. Empty and idle where there are none.
#[derive(Debug, Default, Clone)]
pub(super) struct Traffic {
    /// Some allocation is stored.
    pub(super) active: bool,
    window: u64,
    /// Allocations whose write began.
    sent: Vec<bool>,
    outgoing: VecDeque<usize>,
    outgoing_bytes: u64,
    /// Slots fetched ahead, there, and not asked for.
    ahead: Vec<bool>,
    ahead_bytes: u64,
    /// Place in the order of fetches: what is before it is there, or nothing refers to it.
    next: usize,
    /// The request asked for a stored allocation.
    asked: bool,
    /// Slots that the request must fetch or wait for.
    pub(super) wanted: Vec<usize>,
    is_wanted: Vec<bool>,
    pub(super) transfers: Vec<Transfer>,
}

impl Traffic {
    pub(super) fn begin(&mut self, model: &StepModel, active: bool) {
        self.active = active;
        self.transfers.clear();
        self.wanted.clear();
        self.asked = false;
        self.outgoing.clear();
        if !active {
            return;
        }
        self.window = model.variant.window_bytes.0;
        self.outgoing_bytes = 0;
        self.ahead_bytes = 0;
        self.next = 0;
        super::state::reset(&mut self.sent, model.bytes.len());
        super::state::reset(&mut self.ahead, model.slots.len());
        super::state::reset(&mut self.is_wanted, model.slots.len());
    }

    /// A request needs this slot: by its token, or by a record that runs for it.
    pub(super) fn want(&mut self, slot: usize, there: bool) {
        self.asked = true;
        let waits = !there || self.ahead[slot];
        if waits && !std::mem::replace(&mut self.is_wanted[slot], true) {
            self.wanted.push(slot);
        }
    }

    /// The slot went: if nothing asked for it since it was fetched ahead, it leaves the window.
    #[inline]
    pub(super) fn forget(&mut self, slot: usize, bytes: u64) {
        if self.active && std::mem::take(&mut self.ahead[slot]) {
            self.ahead_bytes = self.ahead_bytes.saturating_sub(bytes);
        }
    }
}

fn id(allocation: usize) -> AllocationId {
    AllocationId(u32::try_from(allocation).unwrap_or(u32::MAX))
}

impl State {
    /// Autograd packs a stored allocation: the first time, its write begins.
    pub(super) fn go_out(&mut self, model: &StepModel, allocation: usize, position: usize) {
        if std::mem::replace(&mut self.traffic.sent[allocation], true) {
            return;
        }
        let bytes = model.bytes[allocation];
        while self.traffic.outgoing_bytes.saturating_add(bytes) > self.traffic.window
            && self.settle_oldest(model, position)
        {}
        let at = op_index(position);
        let allocation_id = id(allocation);
        self.traffic.transfers.push(Transfer::Out {
            at,
            allocation: allocation_id,
        });
        if bytes > self.traffic.window {
            self.traffic.transfers.push(Transfer::Settled {
                at,
                allocation: allocation_id,
            });
            return;
        }
        self.hold(model, allocation, Hold::Saved);
        self.traffic.outgoing.push_back(allocation);
        self.traffic.outgoing_bytes = self.traffic.outgoing_bytes.saturating_add(bytes);
    }

    pub(super) fn settle_all(&mut self, model: &StepModel, position: usize) {
        while self.settle_oldest(model, position) {}
    }

    /// Waits for the oldest write; false when there is none.
    fn settle_oldest(&mut self, model: &StepModel, position: usize) -> bool {
        let Some(allocation) = self.traffic.outgoing.pop_front() else {
            return false;
        };
        let traffic = &mut self.traffic;
        traffic.outgoing_bytes = traffic
            .outgoing_bytes
            .saturating_sub(model.bytes[allocation]);
        traffic.transfers.push(Transfer::Settled {
            at: op_index(position),
            allocation: id(allocation),
        });
        self.let_go(model, allocation, Hold::Saved);
        true
    }

    /// Serves one slot that a request wants: waits for it if it was fetched ahead, fetches it otherwise.
    pub(super) fn fetch(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        slot: usize,
        asker: usize,
        position: usize,
    ) {
        let allocation = model.slots[slot].allocation;
        let (at, bytes) = (op_index(position), model.bytes[allocation]);
        let allocation_id = id(allocation);
        self.traffic.is_wanted[slot] = false;
        if self.slots.peek(slot).materialised {
            self.traffic.forget(slot, bytes);
            self.traffic.transfers.push(Transfer::Asked {
                at,
                allocation: allocation_id,
            });
            return;
        }
        self.valid &= position >= model.forward_end;
        self.traffic.transfers.push(Transfer::Fetch {
            at,
            allocation: allocation_id,
        });
        if treatments[allocation].passes(asker) {
            self.slots.at(slot).passing = true;
        } else {
            self.slots.at(slot).materialised = true;
        }
        self.bring(model, slot, position);
    }

    /// After a request that asked for a stored allocation: fetches the next ones as far as the window goes.
    pub(super) fn fetch_ahead(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        position: usize,
    ) {
        if !std::mem::take(&mut self.traffic.asked) {
            return;
        }
        while let Some(&allocation) = model.fetch_order.get(self.traffic.next) {
            let bytes = model.bytes[allocation];
            let missing = |&slot: &usize| {
                let state = self.slots.peek(slot);
                !state.materialised && state.refs > 0
            };
            let stored = treatments[allocation].is_store();
            let slot = model.last_slot(allocation).filter(missing);
            if let (true, Some(slot)) = (stored, slot) {
                let sum = self.traffic.ahead_bytes.saturating_add(bytes);
                if sum > self.traffic.window {
                    return;
                }
                self.traffic.ahead_bytes = sum;
                self.traffic.ahead[slot] = true;
                self.traffic.transfers.push(Transfer::Ahead {
                    at: op_index(position),
                    allocation: id(allocation),
                });
                self.slots.at(slot).materialised = true;
                self.bring(model, slot, position);
                if self.stopped() {
                    return;
                }
            }
            self.traffic.next += 1;
        }
    }

    /// The bytes of a slot arrive.
    fn bring(&mut self, model: &StepModel, slot: usize, position: usize) {
        let bytes = model.bytes[model.slots[slot].allocation];
        self.live = self.live.saturating_add(bytes);
        self.note(|at| Change::Made { at, slot, bytes });
        let ground = model.ground_between.get(position).copied().unwrap_or(0);
        self.observe(ground, position, Some(model.slots[slot].maker));
    }
}
