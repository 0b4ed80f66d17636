//! Minimum cuts of a network with integer capacities.
//!
//! Responsible for the largest flow from a source to a sink (Dinic, "Algorithm for solution of a problem of
//! maximum flow in networks with power estimation", 1970) and for the side of the source when it is found.
//! Not responsible for what the network means (`relaxation.rs`).
//!
//! # Invariant
//!
//! The flow returned never exceeds the capacity of any cut, also where the work allowed did not suffice.

/// More than any sum of capacities of interest.
pub(super) const UNBOUNDED: u64 = u64::MAX / 4;

/// A directed network. Edges come in pairs: `e ^ 1` is the reverse of `e`.
#[derive(Debug, Default)]
pub(in crate::plan) struct Network {
    /// Edges that leave each node.
    leaving: Vec<Vec<u32>>,
    to: Vec<u32>,
    /// Of each pair.
    capacity: Vec<u64>,
    /// What each edge still takes.
    residual: Vec<u64>,
    /// Steps from the source; `u32::MAX` where it does not reach.
    level: Vec<u32>,
    /// The edge to try next, per node.
    cursor: Vec<u32>,
}

impl Network {
    pub(super) fn add_node(&mut self) -> u32 {
        self.leaving.push(Vec::new());
        index(self.leaving.len() - 1)
    }

    /// Adds an edge and returns its index.
    pub(super) fn add_edge(&mut self, from: u32, to: u32, capacity: u64) -> u32 {
        let edge = index(self.to.len());
        self.leaving[from as usize].push(edge);
        self.leaving[to as usize].push(edge + 1);
        self.to.extend([to, from]);
        self.capacity.push(capacity);
        self.residual.extend([capacity, 0]);
        edge
    }

    /// Gives an edge another capacity, which holds from the next [`Network::clear`] on.
    pub(in crate::plan) fn set(&mut self, edge: u32, capacity: u64) {
        self.capacity[edge as usize / 2] = capacity;
    }

    /// Takes all flow off.
    pub(super) fn clear(&mut self) {
        for (pair, &capacity) in self.residual.chunks_exact_mut(2).zip(&self.capacity) {
            pair.copy_from_slice(&[capacity, 0]);
        }
    }

    /// The largest flow found while scanning at most about `work` edges, which are taken off; with none
    /// left, what was found by then.
    pub(super) fn flow(&mut self, source: u32, sink: u32, work: &mut u64) -> u64 {
        let mut flow: u64 = 0;
        while *work > 0 && self.levels(source, sink, work) {
            self.cursor.clear();
            self.cursor.resize(self.leaving.len(), 0);
            while let Some(pushed) = self.push(source, sink, work) {
                flow = flow.saturating_add(pushed);
            }
        }
        flow
    }

    /// Was the node reached from the source when the last flow ended? Meaningful where work was left.
    pub(super) fn on_source_side(&self, node: u32) -> bool {
        self.level[node as usize] != u32::MAX
    }

    fn levels(&mut self, source: u32, sink: u32, work: &mut u64) -> bool {
        self.level.clear();
        self.level.resize(self.leaving.len(), u32::MAX);
        self.level[source as usize] = 0;
        let mut queue = vec![source];
        let mut next = 0;
        while let Some(&node) = queue.get(next) {
            next += 1;
            let edges = &self.leaving[node as usize];
            *work = work.saturating_sub(edges.len() as u64);
            for &edge in edges {
                let to = self.to[edge as usize];
                if self.residual[edge as usize] > 0 && self.level[to as usize] == u32::MAX {
                    self.level[to as usize] = self.level[node as usize] + 1;
                    queue.push(to);
                }
            }
        }
        self.level[sink as usize] != u32::MAX
    }

    /// Sends flow along one path that goes up a level at each step.
    fn push(&mut self, source: u32, sink: u32, work: &mut u64) -> Option<u64> {
        let mut path: Vec<u32> = Vec::new();
        let mut node = source;
        while node != sink {
            let Some(&edge) = self.leaving[node as usize].get(self.cursor[node as usize] as usize)
            else {
                // A dead end: back one step, and never here again at these levels.
                let edge = path.pop()?;
                node = self.to[edge as usize ^ 1];
                self.cursor[node as usize] += 1;
                continue;
            };
            *work = work.saturating_sub(1);
            let to = self.to[edge as usize];
            let up = self.level[to as usize] == self.level[node as usize].saturating_add(1);
            if up && self.residual[edge as usize] > 0 {
                path.push(edge);
                node = to;
            } else {
                self.cursor[node as usize] += 1;
            }
        }
        let least = path
            .iter()
            .map(|&edge| self.residual[edge as usize])
            .min()?;
        for &edge in &path {
            self.residual[edge as usize] -= least;
            self.residual[edge as usize ^ 1] += least;
        }
        Some(least)
    }
}

fn index(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_flow_is_the_smallest_of_all_cuts(
            edges in prop::collection::vec((0_u32..7, 0_u32..7, 0_u64..20), 0..24)
        ) {
            let mut network = Network::default();
            for _ in 0..7 {
                network.add_node();
            }
            for &(from, to, capacity) in &edges {
                network.add_edge(from, to, capacity);
            }
            let across = |side: &dyn Fn(u32) -> bool| -> u64 {
                let crossing = edges.iter().filter(|edge| side(edge.0) && !side(edge.1));
                crossing.map(|edge| edge.2).sum()
            };
            // Node 0 is the source and node 6 the sink; the five between stand on either side.
            let least = (0_u32..32)
                .map(|set| across(&|node| node == 0 || (node != 6 && set >> (node - 1) & 1 == 1)))
                .min();
            let mut little = 5;
            let some = network.flow(0, 6, &mut little);
            prop_assert!(Some(some) <= least);
            let mut work = 1_000_000;
            let flow = some + network.flow(0, 6, &mut work);
            prop_assert_eq!(Some(flow), least);
            prop_assert_eq!(across(&|node| network.on_source_side(node)), flow);
        }
    }
}
