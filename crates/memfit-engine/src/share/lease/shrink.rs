//! Whom to ask for bytes that another needs.
//!
//! Responsible for choosing elastic leases and how far each should shrink. Not responsible for making
//! them: a holder answers with a resize, declines, or lets the ask lapse.

use super::queue::Rank;
use super::{Claims, Effect, Lease, LeaseId, Machine, Waiting};

impl Machine {
    /// Asks for what the first waiting request lacks, if the elastic leases can give it.
    pub(super) fn ask_for_bytes(&mut self) {
        if !self.may_grant() {
            return;
        }
        let Some((rank, waiting)) = self.first_waiting() else {
            return;
        };
        let promised = self.leases.values().filter_map(|lease| {
            let (to, _) = lease.asked.as_ref()?;
            Some(lease.claims.beyond(to))
        });
        let promised = promised.fold(Claims::NONE, |sum, give| sum.with(&give));
        let short = self.missing(&waiting.wants).beyond(&promised);
        if short.is_empty() {
            return;
        }
        let Some(asks) = self.givers(rank, waiting, short) else {
            return;
        };
        let by = self.now.after(self.settings.shrink_within);
        self.remember(Some(by));
        for (id, to) in asks {
            let Some(lease) = self.leases.get_mut(&id) else {
                continue;
            };
            lease.asked = Some((to.clone(), by));
            let client = lease.client;
            self.effect(Effect::ShrinkAsked {
                client,
                lease: id,
                to,
                by,
            });
        }
    }

    /// What does not fit what is free.
    fn missing(&self, wants: &Claims) -> Claims {
        let free = wants
            .iter()
            .map(|(device, _)| (device, self.ledger.free(device)));
        // The devices of claims are distinct.
        let free = Claims::new(free).unwrap_or_default();
        wants.beyond(&free)
    }

    /// Who shrinks to what, so that the shortage is covered; nothing when it cannot be.
    fn givers(
        &self,
        rank: Rank,
        waiting: &Waiting,
        mut short: Claims,
    ) -> Option<Vec<(LeaseId, Claims)>> {
        let may_be_asked = |lease: &Lease| {
            lease.is_committed
                && lease.asked.is_none()
                && lease.left_alone_until <= self.now
                && lease.client != waiting.client
                && self.queue.of(lease.client).is_none()
                && (lease.priority <= waiting.priority || matches!(rank, Rank::Due(_)))
        };
        let elastic = self.leases.iter().filter(|(_, lease)| may_be_asked(lease));
        let mut elastic: Vec<(&LeaseId, &Lease)> = elastic.collect();
        elastic.sort_by_key(|(id, lease)| (lease.priority, std::cmp::Reverse(**id)));
        let mut asks = Vec::new();
        for (id, lease) in elastic {
            let gives = lease.claims.beyond(&lease.floor).least(&short);
            if !gives.is_empty() {
                short = short.beyond(&gives);
                asks.push((*id, lease.claims.beyond(&gives)));
            }
        }
        short.is_empty().then_some(asks)
    }
}
