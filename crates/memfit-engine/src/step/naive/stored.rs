//! Stored allocations and homes, for the slow twin.
//!
//! Responsible for what may be stored, shrunk or have a home, for writes in forward, and for what a request runs
//! and in which order. Like the rest of the twin it counts nothing along: it asks anew.

use super::super::{Transfer, Treatment};
use super::twin::{Errand, Twin};
use crate::trace::{AllocationId, OpIndex, Phase, ValueId};

fn id(a: usize) -> AllocationId {
    AllocationId(u32::try_from(a).unwrap_or(u32::MAX))
}

fn position(p: usize) -> OpIndex {
    OpIndex(u32::try_from(p).unwrap_or(u32::MAX))
}

impl Twin<'_> {
    /// Finds what makes each allocation, what is treated as it may not be, and the order of fetches.
    pub(super) fn judge(&mut self) {
        let trace = self.trace;
        self.makers = vec![Vec::new(); self.treatments.len()];
        for (i, op) in trace.ops[..self.forward_end].iter().enumerate() {
            let producer = Some(position(i));
            let mut touched: Vec<usize> = Vec::new();
            let written = |made: &[Vec<usize>], a: usize| !made[a].is_empty();
            for &output in &op.outputs {
                let a = trace.allocation_of(output).index();
                if trace.allocations[a].producer == producer {
                    touched.push(a);
                }
            }
            for &write in &op.writes {
                let a = trace.allocation_of(write).index();
                if written(&self.makers, a) {
                    touched.push(a);
                }
            }
            touched.sort_unstable();
            touched.dedup();
            for a in touched {
                self.makers[a].push(i);
            }
        }
        for a in 0..self.treatments.len() {
            if self.comes_back(a) {
                self.stored.returning.push(a);
            }
            if !self.may_be_treated_so(a) {
                self.result.refused = Some(id(a));
            }
        }
        self.stored.fetched = vec![false; self.treatments.len()];
        self.stored.unasked = vec![false; self.treatments.len()];
        self.stored.shrunk = vec![false; self.treatments.len()];
        let mut unpacks: Vec<(usize, usize)> = (0..trace.saved.len())
            .filter_map(|i| Some((trace.saved[i].unpack?.index(), i)))
            .collect();
        unpacks.sort_unstable();
        for (_, i) in unpacks {
            let a = trace.allocation_of(trace.saved[i].value).index();
            if self.is_stored(a) && !self.stored.order.contains(&a) {
                self.stored.order.push(a);
            }
        }
    }

    fn may_be_treated_so(&self, a: usize) -> bool {
        let trace = self.trace;
        let touches = |&value: &ValueId| trace.allocation_of(value) == id(a);
        let writes = |from: usize| {
            trace.ops[from.min(trace.ops.len())..]
                .iter()
                .any(|op| op.phase != Phase::Optimizer && op.writes.iter().any(touches))
        };
        let home = match self.treatments[a] {
            Treatment::Keep => return true,
            Treatment::Drop { home }
            | Treatment::Store { home }
            | Treatment::Shrink { home, .. } => home.index(),
        };
        let home_is_right = home >= self.forward_end
            || self.makers[a].first().is_some_and(|&maker| maker < home) && !writes(0);
        if !self.comes_back(a) {
            return home_is_right;
        }
        let saves = || self.saved_of[a].iter().map(|&i| &trace.saved[i]);
        let Some(first) = saves().map(|saved| saved.pack.index()).min() else {
            return false;
        };
        let newest = saves().all(|saved| {
            trace.values[saved.value.index()].version as usize + 1 == self.makers[a].len()
        });
        let in_forward = saves().all(|saved| saved.pack.index() <= self.forward_end);
        let natural = trace.allocations[a].natural.last();
        home_is_right
            && self.bytes(a) > 0
            && newest
            && in_forward
            && natural.is_none_or(|&(_, end)| end < trace.end())
            && !writes(first)
            && (!self.is_shrunk(a) || self.is_float32(a))
    }

    /// Autograd packs: what is stored goes out, what is shrunk becomes narrower.
    pub(super) fn packs_at(&mut self, p: usize, packs: &[usize]) {
        if self.stored.returning.is_empty() || p > self.forward_end {
            return;
        }
        let window = self.variant.window_bytes.0;
        for &i in packs {
            let a = self.trace.allocation_of(self.trace.saved[i].value).index();
            if self.is_shrunk(a) {
                self.shrink(a, p);
            }
            if !self.is_stored(a) || self.stored.sent.contains(&a) {
                continue;
            }
            let mut going: Vec<usize> = self.stored.sent[self.stored.settled..].to_vec();
            going.push(a);
            while going.len() > 1 && going.iter().map(|&a| self.bytes(a)).sum::<u64>() > window {
                self.settle(going.remove(0), p);
            }
            self.stored.sent.push(a);
            let (at, allocation) = (position(p), id(a));
            self.result.transfers.push(Transfer::Out { at, allocation });
            if self.bytes(a) > window {
                self.settle(a, p);
            }
        }
        if p == self.forward_end {
            while let Some(&oldest) = self.stored.sent.get(self.stored.settled) {
                self.settle(oldest, p);
            }
        }
    }

    fn settle(&mut self, a: usize, p: usize) {
        self.stored.settled += 1;
        let (at, allocation) = (position(p), id(a));
        self.result
            .transfers
            .push(Transfer::Settled { at, allocation });
    }

    /// Backward asks for a saved tensor.
    pub(super) fn request(&mut self, saved: usize, p: usize) {
        let value = &self.trace.values[self.trace.saved[saved].value.index()];
        let a = value.allocation.index();
        let maker = self.makers[a].get(value.version as usize);
        let Some(&maker) = maker else { return };
        if self.comes_back(a) {
            if self.reach(p, false, None).stored[a] {
                self.fetch(a, maker, p);
                if self.is_stored(a) {
                    self.fetch_ahead(p);
                }
            }
        } else if self.is_dropped(a)
            && let Some(version) = self.version_of(a, value.version)
        {
            let errands = self.errands(self.versions[version].record);
            for (n, &errand) in errands.iter().enumerate() {
                match errand {
                    Errand::Fetch(a) => self.fetch(a, maker, p),
                    Errand::Replay(record) => self.replay(record, maker, p),
                }
                self.let_pass(&errands[n + 1..]);
            }
            let is_stored = |e: &Errand| matches!(e, Errand::Fetch(a) if self.is_stored(*a));
            if errands.iter().any(is_stored) {
                self.fetch_ahead(p);
            }
        }
    }

    /// What must run for a record to run, in order, itself last. A fetch is listed for everything stored
    /// that is read, there or not.
    fn errands(&self, record: usize) -> Vec<Errand> {
        if self.records[record].consumed {
            return Vec::new();
        }
        let mut errands = vec![Errand::Replay(record)];
        let mut i = 0;
        while i < errands.len() {
            if let Errand::Replay(record) = errands[i] {
                let read = &self.records[record];
                let makers = read.reads_versions.iter().map(|&v| self.versions[v].record);
                let missing = makers.filter(|&r| !self.records[r].consumed);
                let fetches = read.reads_stored.iter().map(|&a| Errand::Fetch(a));
                for errand in missing.map(Errand::Replay).chain(fetches) {
                    if !errands.contains(&errand) {
                        errands.push(errand);
                    }
                }
            }
            i += 1;
        }
        errands.sort_by_key(|errand| match *errand {
            Errand::Fetch(a) => (self.makers[a].last().copied(), 0, a),
            Errand::Replay(record) => (Some(self.records[record].op), 1, 0),
        });
        errands
    }

    /// Is a request for what op `asker` made far from where this allocation is at home?
    pub(super) fn is_far(&self, a: usize, asker: usize) -> bool {
        match self.treatments[a] {
            Treatment::Keep => false,
            Treatment::Drop { home }
            | Treatment::Store { home }
            | Treatment::Shrink { home, .. } => asker >= home.index(),
        }
    }

    /// What passes and is read by none of the errands left goes.
    fn let_pass(&mut self, left: &[Errand]) {
        let all = &self.records;
        let still = |reads: &dyn Fn(usize) -> bool| {
            left.iter()
                .any(|errand| matches!(errand, Errand::Replay(record) if reads(*record)))
        };
        self.passing_versions
            .retain(|v| still(&|r| all[r].reads_versions.contains(v)));
        self.passing_stored
            .retain(|a| still(&|r| all[r].reads_stored.contains(a)));
    }

    fn fetch(&mut self, a: usize, asker: usize, p: usize) {
        let (at, allocation) = (position(p), id(a));
        if self.stored.fetched[a] {
            if std::mem::take(&mut self.stored.unasked[a]) {
                self.result
                    .transfers
                    .push(Transfer::Asked { at, allocation });
            }
            return;
        }
        if p < self.forward_end {
            self.result.stale = Some(at);
        }
        self.result.transfers.push(if self.is_shrunk(a) {
            Transfer::Expanded { at, allocation }
        } else {
            Transfer::Fetch { at, allocation }
        });
        let height = self.height(p, false, self.bytes(a));
        self.see(height);
        if self.is_far(a, asker) {
            self.passing_stored.push(a);
        } else {
            self.stored.fetched[a] = true;
        }
    }

    fn fetch_ahead(&mut self, p: usize) {
        let there = self.reach(p, false, None).stored; // whatever is fetched
        for a in self.stored.order.clone() {
            if self.stored.fetched[a] || !there[a] {
                continue;
            }
            let unasked = |&&b: &&usize| self.stored.unasked[b] && there[b];
            let ahead = self.stored.order.iter().filter(unasked);
            let sum: u64 = ahead.map(|&b| self.bytes(b)).sum();
            if sum + self.bytes(a) > self.variant.window_bytes.0 {
                return;
            }
            self.stored.fetched[a] = true;
            self.stored.unasked[a] = true;
            let (at, allocation) = (position(p), id(a));
            self.result
                .transfers
                .push(Transfer::Ahead { at, allocation });
            let height = self.height(p, false, 0);
            self.see(height);
        }
    }
}
