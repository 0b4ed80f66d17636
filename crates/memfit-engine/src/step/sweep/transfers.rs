//! Stored allocations: out in forward, back in backward.
//!
//! Responsible for the queue of what is on its way out, for fetches, for what is fetched ahead, and for
//! the list of it all. Part of the sweep (`evaluate.rs`); who refers to what is counted in `state.rs`.

use super::change::Change;
use super::state::{Doing, Hold, State};
use super::traffic::{Transfer, id};
use crate::step::layout::model::StepModel;
use crate::step::layout::treatment::Treatment;
use crate::trace::op_index;

impl State {
    /// A request needs this slot, which is stored or shrunk: by its token, or by a record that runs for it.
    pub(super) fn want(&mut self, slot: usize, treatment: Treatment) {
        self.traffic.asked |= treatment.is_store();
        let state = self.slots.at(slot);
        let waits = !state.materialised || state.is_ahead;
        if waits && !std::mem::replace(&mut state.is_wanted, true) {
            self.traffic.wanted.push(slot);
        }
    }

    /// The slot went, or was asked for: if it was fetched ahead, it leaves the window.
    #[inline]
    pub(super) fn forget(&mut self, slot: usize, bytes: u64) {
        if std::mem::take(&mut self.slots.at(slot).is_ahead) {
            self.traffic.leave_window(bytes);
        }
    }

    /// Autograd packs a stored allocation: the first time, its write begins.
    pub(super) fn go_out(&mut self, model: &StepModel, allocation: usize, position: usize) {
        if std::mem::replace(&mut self.holders.at(allocation).sent, true) {
            return;
        }
        let bytes = model.bytes[allocation];
        while self.traffic.out().bytes.saturating_add(bytes) > self.traffic.window
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
        let out = self.traffic.out();
        out.queue.push_back(allocation);
        out.bytes = out.bytes.saturating_add(bytes);
    }

    pub(in crate::step) fn settle_all(&mut self, model: &StepModel, position: usize) {
        while self.settle_oldest(model, position) {}
    }

    /// Waits for the oldest write; false when there is none.
    fn settle_oldest(&mut self, model: &StepModel, position: usize) -> bool {
        let out = self.traffic.out();
        let Some(allocation) = out.queue.pop_front() else {
            return false;
        };
        out.bytes = out.bytes.saturating_sub(model.bytes[allocation]);
        self.traffic.transfers.push(Transfer::Settled {
            at: op_index(position),
            allocation: id(allocation),
        });
        self.let_go(model, allocation, Hold::Saved);
        true
    }

    /// Serves one slot that a request wants: waits for it if it was fetched ahead, fetches it otherwise.
    pub(in crate::step) fn fetch(
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
        let state = self.slots.at(slot);
        state.is_wanted = false;
        if let Treatment::Shrink { .. } = treatments[allocation] {
            self.expand(model, treatments[allocation], slot, asker, position);
            return;
        }
        if state.materialised {
            self.forget(slot, bytes);
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
    pub(in crate::step) fn fetch_ahead(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        position: usize,
    ) {
        if !std::mem::take(&mut self.traffic.asked) {
            return;
        }
        while let Some(&allocation) = model.fetch_order.get(self.traffic.ahead().next) {
            let bytes = model.bytes[allocation];
            let stored = self.treatment(treatments, allocation).is_store();
            let slot = model.last_slot(allocation).filter(|_| stored);
            let missing = |&slot: &usize| {
                let state = self.slots.at(slot);
                !state.materialised && state.refs > 0
            };
            if let Some(slot) = slot.filter(missing) {
                let sum = self.traffic.ahead().bytes.saturating_add(bytes);
                if sum > self.traffic.window {
                    return;
                }
                self.traffic.ahead().bytes = sum;
                self.slots.at(slot).is_ahead = true;
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
            self.traffic.ahead().next += 1;
        }
    }

    /// The bytes of a slot arrive.
    pub(super) fn bring(&mut self, model: &StepModel, slot: usize, position: usize) {
        let bytes = model.bytes[model.slots[slot].allocation];
        self.live = self.live.saturating_add(bytes);
        self.note(|at| Change::Made { at, slot, bytes });
        let ground = model.ground_between.get(position).copied().unwrap_or(0);
        let maker = model.slots[slot].maker;
        self.observe(ground, position, Doing::Replay(maker));
    }
}
