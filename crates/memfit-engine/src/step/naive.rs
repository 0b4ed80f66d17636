//! The slow twin of the sweep: the same meaning, by reachability instead of reference counts.
//!
//! Responsible for evaluating a transformed trace straight from the trace and the definition in
//! `docs/concepts/transformed-trace.md`. At every moment it recomputes from nothing what is reachable.
//! Shares no code and no data structure with `layout/` and `sweep/`; every plan passes it.
//!
//! Quadratic: a step of some thousand ops takes a fraction of a second. What cannot be alive for hundreds of
//! ops around is not asked about there, nor is what is kept asked for what only a treatment changes; that is
//! all the cleverness.

mod shrunk;
mod stored;
mod twin;
mod updated;

pub use twin::NaiveEvaluation;

use self::twin::{Reach, Record, STRETCH, Stored, Twin, Updates, Version};
use super::{Treatment, Variant};
use crate::bytes::Bytes;
use crate::trace::{Category, OpIndex, Phase, Trace};

/// Evaluates `trace` with `treatments[allocation]`, naively. Whether what is dropped may be is not asked.
#[must_use]
pub fn evaluate(trace: &Trace, variant: Variant, treatments: &[Treatment]) -> NaiveEvaluation {
    let forward_end = trace.forward_end().index();
    let gradients = trace.updates.iter().map(|u| u.gradient.index());
    let is_gradient = |a: &usize| trace.allocations[*a].category == Category::Gradient;
    let mut distinct: Vec<usize> = gradients.filter(is_gradient).collect();
    distinct.sort_unstable();
    distinct.dedup();
    let mut constant = updated::room_of_parameters(trace, variant);
    if variant.accumulate {
        constant += distinct
            .iter()
            .map(|&a| trace.allocations[a].bytes.0)
            .sum::<u64>();
    }
    let result = NaiveEvaluation {
        peak_bytes: Bytes::ZERO,
        replayed: Vec::new(),
        stale: None,
        refused: None,
        transfers: Vec::new(),
    };
    let mut saved_of = vec![Vec::new(); trace.allocations.len()];
    for (i, saved) in trace.saved.iter().enumerate() {
        saved_of[trace.allocation_of(saved.value).index()].push(i);
    }
    let mut twin = Twin {
        trace,
        variant,
        treatments,
        forward_end,
        versions: Vec::new(),
        records: Vec::new(),
        saved_of,
        versions_of: vec![Vec::new(); trace.allocations.len()],
        ranges: Vec::new(),
        near: Vec::new(),
        treated: Vec::new(),
        last_writes: Vec::new(),
        stored: Stored::default(),
        makers: Vec::new(),
        passing_versions: Vec::new(),
        passing_stored: Vec::new(),
        constant,
        updates: Updates::default(),
        narrow_state: updated::narrow_state_bytes(trace, variant),
        result,
    };
    twin.lay_out();
    twin.judge();
    twin.run();
    twin.result
}

impl Twin<'_> {
    fn run(&mut self) {
        let mut unpacks = vec![Vec::new(); self.trace.ops.len() + 1];
        let mut packs = unpacks.clone();
        for (i, saved) in self.trace.saved.iter().enumerate() {
            packs[saved.pack.index()].push(i);
            if let Some(unpack) = saved.unpack {
                unpacks[unpack.index()].push(i);
            }
        }
        let end = self.end();
        self.updates.order(self.trace, self.variant, end);
        for (p, unpacks) in unpacks.iter().enumerate().take(end + 1) {
            self.packs_at(p, &packs[p]);
            self.updates_at(p, end);
            for &i in unpacks {
                self.request(i, p);
            }
            if p == end {
                break;
            }
            let height = self.height(p, true, 0) + self.trace.ops[p].workspace_bytes.0;
            self.see(height);
            if p < self.forward_end {
                self.record(p);
            }
        }
    }

    fn see(&mut self, height: u64) {
        self.result.peak_bytes = self.result.peak_bytes.max(Bytes(height));
    }

    fn lay_out(&mut self) {
        let shortened = self.variant.fuse_optimizer || self.variant.accumulate;
        let mut cuts = vec![usize::MAX; self.treatments.len()];
        for update in self.trace.updates.iter().filter(|_| shortened) {
            let gradient = update.gradient.index();
            if self.trace.allocations[gradient].category == Category::Gradient {
                cuts[gradient] = update.ready.index();
            }
        }
        let states = self.trace.updates.iter().flat_map(|update| &update.state);
        for state in states.filter(|&&state| self.is_away(state)) {
            cuts[state.index()] = 0;
        }
        self.near = vec![Vec::new(); self.trace.ops.len() / STRETCH + 1];
        for (a, allocation) in self.trace.allocations.iter().enumerate() {
            let natural = allocation.natural.iter();
            let ranges: Vec<_> = natural
                .map(|&(s, e)| (s.index(), e.index().min(cuts[a])))
                .collect();
            let tokens = self.saved_of[a].iter().map(|&i| {
                let saved = &self.trace.saved[i];
                (saved.pack.index(), saved.release.index())
            });
            for (s, e) in ranges.iter().copied().chain(tokens) {
                let last = (e / STRETCH).min(self.near.len() - 1);
                for stretch in s / STRETCH..=last {
                    if self.near[stretch].last() != Some(&a) {
                        self.near[stretch].push(a);
                    }
                }
            }
            self.ranges.push(ranges);
        }
        for near in &mut self.near {
            near.sort_unstable();
            near.dedup();
            let is_treated = |&&a: &&usize| self.treatments[a] != Treatment::Keep;
            let treated = near.iter().filter(is_treated).copied();
            self.treated.push(treated.collect());
        }
        self.last_writes = vec![None; self.treatments.len()];
        for (i, op) in self.trace.ops.iter().enumerate() {
            for &write in op.writes.iter().filter(|_| op.phase != Phase::Optimizer) {
                self.last_writes[self.trace.allocation_of(write).index()] = Some(i);
            }
        }
    }

    /// Is allocation `a` naturally alive? `running`: while op `p` runs; otherwise just before it.
    fn natural(&self, a: usize, p: usize, running: bool, forward_only: bool) -> bool {
        self.ranges[a].iter().any(|&(s, e)| {
            let counts = !forward_only || s < self.forward_end;
            counts
                && if running {
                    s <= p && p < e
                } else {
                    s < p && p < e
                }
        })
    }

    fn token_alive(&self, saved: usize, p: usize) -> bool {
        let saved = &self.trace.saved[saved];
        saved.pack.index() <= p && p < saved.release.index()
    }

    fn version_of(&self, a: usize, number: u32) -> Option<usize> {
        self.versions_of[a].get(number as usize).copied()
    }

    fn latest(&self, a: usize) -> Option<usize> {
        self.versions_of[a].last().copied()
    }

    fn is_dropped(&self, a: usize) -> bool {
        matches!(self.treatments[a], Treatment::Drop { .. })
    }

    fn is_stored(&self, a: usize) -> bool {
        matches!(self.treatments[a], Treatment::Store { .. })
    }

    /// What is reachable, as if record `without` did not exist.
    fn reach(&self, p: usize, running: bool, without: Option<usize>) -> Reach {
        let mut versions = vec![false; self.versions.len()];
        let mut records = vec![false; self.records.len()];
        let mut stored = vec![
            false;
            if self.stored.returning.is_empty() {
                0
            } else {
                self.treatments.len()
            }
        ];
        let near = self.treated[p / STRETCH].iter().copied();
        for a in near.clone().filter(|&a| self.comes_back(a)) {
            let token = self.saved_of[a].iter().any(|&i| self.token_alive(i, p));
            stored[a] = token || self.backward_ranges(a, p, running).next().is_some();
        }
        for a in near.filter(|&a| self.is_dropped(a)) {
            let natural = self.natural(a, p, running, true);
            for &version in &self.versions_of[a] {
                versions[version] |= natural;
            }
            for &i in self.saved_of[a].iter().filter(|&&i| self.token_alive(i, p)) {
                let value = &self.trace.values[self.trace.saved[i].value.index()];
                if let Some(version) = self.version_of(a, value.version) {
                    versions[version] = true;
                }
            }
            for s in self.backward_ranges(a, p, running) {
                let by = self.saved_of[a]
                    .iter()
                    .map(|&i| &self.trace.saved[i])
                    .find(|saved| saved.unpack.is_some_and(|u| u.index() == s));
                let version = by
                    .and_then(|saved| {
                        self.version_of(a, self.trace.values[saved.value.index()].version)
                    })
                    .or_else(|| self.latest(a));
                if let Some(version) = version {
                    versions[version] = true;
                }
            }
        }
        // Later records read what earlier ones made: one pass from the last to the first is enough.
        for r in (0..self.records.len()).rev() {
            if self.records[r].consumed || without == Some(r) {
                continue;
            }
            if self.records[r].made.clone().any(|v| versions[v]) {
                records[r] = true;
                for &v in &self.records[r].reads_versions {
                    versions[v] = true;
                }
                for &a in &self.records[r].reads_stored {
                    stored[a] = true;
                }
            }
        }
        Reach {
            versions,
            records,
            stored,
        }
    }

    /// Where the ranges of `a` that backward opened and that hold it at `p` start.
    fn backward_ranges(
        &self,
        a: usize,
        p: usize,
        running: bool,
    ) -> impl Iterator<Item = usize> + '_ {
        let ranges = self.ranges[a].iter();
        let backward = ranges.filter(|range| range.0 >= self.forward_end);
        let open = backward.filter(move |&&(s, e)| (s < p || running && s == p) && p < e);
        open.map(|&(s, _)| s)
    }

    /// Bytes alive, plus `extra`.
    fn height(&self, p: usize, running: bool, extra: u64) -> u64 {
        let reach = self.reach(p, running, None);
        let mut counted = vec![false; self.treatments.len()];
        let mut total = self.constant + self.updates.state_bytes + extra;
        let mut count = |a: usize| {
            if !std::mem::replace(&mut counted[a], true) {
                total += self.bytes(a);
            }
        };
        for r in (0..self.records.len()).filter(|&r| reach.records[r]) {
            self.records[r].pins.iter().for_each(|&a| count(a));
        }
        let outgoing = &self.stored.sent[self.stored.settled..];
        for &a in outgoing {
            count(a);
        }
        for &a in &self.near[p / STRETCH] {
            let kept = !self.is_dropped(a) && !self.comes_back(a);
            let saved = kept && self.saved_of[a].iter().any(|&i| self.token_alive(i, p));
            let forward_only = self.comes_back(a) || self.is_dropped(a) && self.latest(a).is_some();
            if saved || self.natural(a, p, running, forward_only) {
                count(a);
            }
        }
        for (v, version) in self.versions.iter().enumerate() {
            let stays = version.materialised && !version.stolen && reach.versions[v];
            if stays || self.passing_versions.contains(&v) {
                total += self.bytes(version.allocation);
            }
        }
        for &a in &self.stored.returning {
            let stays = self.stored.fetched[a] && reach.stored[a];
            if stays || self.passing_stored.contains(&a) {
                total += self.bytes(a);
            }
        }
        total + self.narrow_bytes(&reach, p, running)
    }

    fn bytes(&self, a: usize) -> u64 {
        if updated::is_parameter_away(self.trace, self.variant, a) {
            return 0;
        }
        if let Some(&narrow) = self.narrow_state.get(&a) {
            return narrow;
        }
        self.trace.allocations[a].bytes.0
    }

    fn record(&mut self, op: usize) {
        let trace = self.trace;
        let index = OpIndex(u32::try_from(op).unwrap_or(u32::MAX));
        let mut makes: Vec<(usize, u32)> = Vec::new();
        for &output in &trace.ops[op].outputs {
            let a = trace.allocation_of(output).index();
            if self.is_dropped(a) && trace.allocations[a].producer == Some(index) {
                makes.push((a, 0));
            }
        }
        for &write in &trace.ops[op].writes {
            let a = trace.allocation_of(write).index();
            if let (true, Some(last)) = (self.is_dropped(a), self.latest(a)) {
                makes.push((a, self.versions[last].number + 1));
            }
        }
        makes.sort_unstable();
        makes.dedup_by_key(|&mut (a, _)| a);
        if makes.is_empty() {
            return;
        }
        let (mut reads_versions, mut reads_stored, mut pins) = (Vec::new(), Vec::new(), Vec::new());
        let shape_is_enough = trace.ops[op].shape_only;
        for &read in trace.ops[op].reads.iter().filter(|_| !shape_is_enough) {
            let value = &trace.values[read.index()];
            let a = value.allocation.index();
            match self.version_of(a, value.version) {
                Some(version) if self.is_dropped(a) => reads_versions.push(version),
                _ => {
                    if self.comes_back(a) {
                        reads_stored.push(a);
                    } else {
                        pins.push(a);
                    }
                    let overwritten = self.last_writes[a].is_some_and(|last| last > op);
                    if overwritten {
                        self.result.stale = Some(index);
                    }
                }
            }
        }
        let record = self.records.len();
        let first = self.versions.len();
        for (allocation, number) in makes {
            self.versions_of[allocation].push(self.versions.len());
            let (materialised, stolen) = (false, false);
            self.versions.push(Version {
                allocation,
                number,
                record,
                materialised,
                stolen,
            });
        }
        let made = first..self.versions.len();
        self.records.push(Record {
            op,
            reads_versions,
            reads_stored,
            pins,
            made,
            consumed: false,
        });
    }

    fn replay(&mut self, record: usize, asker: usize, p: usize) {
        let op = self.records[record].op;
        let index = OpIndex(u32::try_from(op).unwrap_or(u32::MAX));
        if self.variant.fuse_optimizer {
            let stale = self.trace.updates.iter().any(|u| {
                u.ready.index() <= p && self.records[record].pins.contains(&u.parameter.index())
            });
            if stale {
                self.result.stale = Some(index);
            }
        }
        let others = self.read_by_others(record, p);
        let (mut made, mut passed) = (0, None);
        for v in 0..self.versions.len() {
            if self.versions[v].record != record {
                continue;
            }
            let Version {
                allocation, number, ..
            } = self.versions[v];
            let taken = number
                .checked_sub(1)
                .and_then(|n| self.version_of(allocation, n));
            match taken {
                Some(taken) if !others[taken] => passed = Some(taken),
                _ => made += self.trace.allocations[allocation].bytes.0,
            }
        }
        for &output in &self.trace.ops[op].outputs {
            let a = self.trace.allocation_of(output).index();
            if !self.is_dropped(a) && self.trace.allocations[a].producer == Some(index) {
                made += self.trace.allocations[a].bytes.0;
            }
        }
        let workspace = self.trace.ops[op].workspace_bytes.0;
        let height = self.height(p, false, made + workspace);
        self.see(height);
        if let Some(taken) = passed {
            self.versions[taken].stolen = true;
        }
        self.result.replayed.push(index);
        let made = self.records[record].made.clone();
        if made
            .clone()
            .all(|v| self.is_far(self.versions[v].allocation, asker))
        {
            self.passing_versions.extend(made);
            return;
        }
        self.records[record].consumed = true;
        for v in 0..self.versions.len() {
            if self.versions[v].record == record {
                self.versions[v].materialised = true;
            }
        }
    }

    /// Versions that something other than this record refers to. A record that let its outputs pass may run again
    /// while it exists, even if only this one refers to it.
    fn read_by_others(&self, record: usize, p: usize) -> Vec<bool> {
        let mut made = self.records[record].made.clone();
        if made.all(|v| self.versions[v].number == 0) {
            // Nothing is written in place, so this is never asked.
            return Vec::new();
        }
        let mut versions = self.reach(p, false, Some(record)).versions;
        let exist = self.reach(p, false, None).records;
        for other in (0..self.records.len()).filter(|&r| exist[r] && r != record) {
            for &v in &self.records[other].reads_versions {
                versions[v] = true;
            }
        }
        versions
    }
}
