//! Shrunk allocations: narrower in forward, expanded in backward.
//!
//! Responsible for when the narrower form is there. Part of the sweep (`evaluate.rs`); who refers to what is counted in
//! `state.rs`, and what a request wants in `transfers.rs`.

use super::change::Change;
use super::state::{Doing, State};
use super::traffic::{Transfer, id};
use crate::step::layout::model::StepModel;
use crate::step::layout::treatment::Treatment;
use crate::trace::op_index;

impl State {
    /// Autograd packs a shrunk allocation: its narrower form is made, unless it is there. The tensor itself refers to it
    /// while it lives in forward.
    pub(super) fn shrink(
        &mut self,
        model: &StepModel,
        treatment: Treatment,
        slot: usize,
        position: usize,
    ) {
        let state = *self.slots.at(slot);
        if state.is_shrunk || state.materialised {
            return;
        }
        let allocation = model.slots[slot].allocation;
        let is_alive = self.holders.at(allocation).natural > 0;
        let state = self.slots.at(slot);
        state.is_shrunk = true;
        if is_alive && !std::mem::replace(&mut state.original, true) {
            state.refs += 1;
        }
        let bytes = narrow_bytes(model, treatment, slot);
        self.live = self.live.saturating_add(bytes);
        let comes = true;
        self.note(|at| Change::Narrow {
            at,
            slot,
            bytes,
            comes,
        });
        self.traffic.transfers.push(Transfer::Shrunk {
            at: op_index(position),
            allocation: id(allocation),
        });
        // Inside the call of the op before: what ends with it is there still, its scratch is not.
        let before = position.saturating_sub(1);
        let ground = model.ground.get(before).copied().unwrap_or(0);
        let workspace = model.records.get(before).map_or(0, |it| it.workspace);
        self.observe(ground.saturating_sub(workspace), before, Doing::Op);
    }

    /// A request wants a shrunk slot that is not there.
    pub(super) fn expand(
        &mut self,
        model: &StepModel,
        treatment: Treatment,
        slot: usize,
        asker: usize,
        position: usize,
    ) {
        self.valid &= position >= model.forward_end;
        self.traffic.transfers.push(Transfer::Expanded {
            at: op_index(position),
            allocation: id(model.slots[slot].allocation),
        });
        let passes = treatment.passes(asker);
        let state = self.slots.at(slot);
        if passes {
            state.passing = true;
        } else {
            state.materialised = true;
        }
        self.bring(model, slot, position);
        if passes {
            return;
        }
        let state = self.slots.at(slot);
        if std::mem::take(&mut state.original) {
            state.refs = state.refs.saturating_sub(1);
        }
        self.leave_narrow(model, treatment, slot);
    }

    /// Nothing needs the narrower form any more, if it is there.
    pub(super) fn leave_narrow(&mut self, model: &StepModel, treatment: Treatment, slot: usize) {
        if !std::mem::take(&mut self.slots.at(slot).is_shrunk) {
            return;
        }
        let bytes = narrow_bytes(model, treatment, slot);
        self.live = self.live.saturating_sub(bytes);
        let comes = false;
        self.note(|at| Change::Narrow {
            at,
            slot,
            bytes,
            comes,
        });
    }
}

/// Bytes of the narrower form of a slot; none of one that is not shrunk.
pub(super) fn narrow_bytes(model: &StepModel, treatment: Treatment, slot: usize) -> u64 {
    match treatment {
        Treatment::Shrink { to, .. } => to.bytes(model.bytes[model.slots[slot].allocation]),
        _ => 0,
    }
}
