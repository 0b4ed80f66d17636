//! The requests that wait, in the order of service.
//!
//! Responsible for the order, for who is overtaken and for who becomes due. Not responsible for granting.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Claims, ClientId, Millis, Priority, Waiting};

/// A place in the order of service; the order of the variants is the order of the classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// The waiting holder.
    Holder,
    /// Waited long enough, in the order of becoming due.
    Due(u64),
    /// By priority, then arrival.
    Fresh(Reverse<Priority>, u64),
}

impl Rank {
    /// Whether nothing behind it gets a byte on its devices.
    pub(crate) const fn blocks(self) -> bool {
        matches!(self, Self::Holder | Self::Due(_))
    }
}

/// All waiting requests; one a client at most, one holder at most.
#[derive(Debug, Clone, Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<Rank, Waiting>,
    ranks: BTreeMap<ClientId, Rank>,
    due: u64,
}

impl Queue {
    /// Lets a request wait. Its client does not wait yet, and with `is_holder` no holder does.
    pub(crate) fn push(&mut self, waiting: Waiting, is_holder: bool) -> Rank {
        let rank = if is_holder {
            Rank::Holder
        } else {
            Rank::Fresh(Reverse(waiting.priority), waiting.arrival)
        };
        self.ranks.insert(waiting.client, rank);
        self.waiting.insert(rank, waiting);
        rank
    }

    /// Takes a client's request out.
    pub(crate) fn remove(&mut self, client: ClientId) -> Option<Waiting> {
        let rank = self.ranks.remove(&client)?;
        self.waiting.remove(&rank)
    }

    /// A client's request.
    pub(crate) fn of(&self, client: ClientId) -> Option<&Waiting> {
        self.waiting.get(self.ranks.get(&client)?)
    }

    /// In the order of service.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Rank, &Waiting)> {
        self.waiting.iter().map(|(rank, waiting)| (*rank, waiting))
    }

    /// Whether a holder waits.
    pub(crate) fn has_holder(&self) -> bool {
        self.waiting.contains_key(&Rank::Holder)
    }

    /// Whether the waiting holder or a due request claims one of these devices.
    pub(crate) fn blocks(&self, claims: &Claims) -> bool {
        let blocking = self.iter().take_while(|(rank, _)| rank.blocks());
        blocking
            .into_iter()
            .any(|(_, waiting)| waiting.wants.meets(claims))
    }

    /// How many are served before this one.
    pub(crate) fn ahead_of(&self, rank: Rank) -> usize {
        self.waiting.range(..rank).count()
    }

    /// Counts a grant to a request of this arrival; says whether anyone became due by it.
    pub(crate) fn overtake(&mut self, arrival: u64, claims: &Claims, limit: u32) -> bool {
        let mut became_due = Vec::new();
        for (rank, waiting) in &mut self.waiting {
            let is_passed = !rank.blocks() && waiting.arrival < arrival;
            if is_passed && waiting.wants.meets(claims) {
                waiting.overtaken = waiting.overtaken.saturating_add(1);
                if waiting.overtaken >= limit {
                    became_due.push((waiting.arrival, *rank));
                }
            }
        }
        self.make_due(became_due)
    }

    /// Makes those due that have waited since `since` or longer.
    pub(crate) fn lose_patience(&mut self, since: Millis) -> bool {
        let patient = self
            .iter()
            .filter(|(rank, waiting)| !rank.blocks() && waiting.since <= since);
        let became_due = patient
            .map(|(rank, waiting)| (waiting.arrival, rank))
            .collect();
        self.make_due(became_due)
    }

    /// In the order of arrival.
    fn make_due(&mut self, mut became_due: Vec<(u64, Rank)>) -> bool {
        became_due.sort_unstable();
        for (_, rank) in &became_due {
            if let Some(waiting) = self.waiting.remove(rank) {
                self.due += 1;
                self.ranks.insert(waiting.client, Rank::Due(self.due));
                self.waiting.insert(Rank::Due(self.due), waiting);
            }
        }
        !became_due.is_empty()
    }
}
