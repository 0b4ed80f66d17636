//! What time alone does: expiry, patience, the end of waiting, lapsed shrink requests.
//!
//! Responsible for the order in which overdue things happen and for knowing when to look again. Not
//! responsible for reading a clock.

use super::{Claims, ClientId, Effect, End, LeaseId, Machine, Millis, Refusal, RequestId};

impl Machine {
    /// Moves the clock. What is overdue happens in this order, whatever its own times were: leases end,
    /// requests become due, the queue is served, requests that waited too long are refused, shrink
    /// requests lapse.
    pub(super) fn pass_time(&mut self, now: Millis) {
        self.now = self.now.max(now);
        if self.earliest.is_none_or(|earliest| earliest > self.now) {
            return;
        }
        let is_over = |ends: Option<Millis>| ends.is_some_and(|ends| ends <= self.now);
        let over = self.leases.iter().filter(|(_, lease)| is_over(lease.ends));
        let over: Vec<LeaseId> = over.map(|(id, _)| *id).collect();
        for lease in over {
            self.end(lease, None, End::Expired);
        }
        if let Some(since) = self.now.0.checked_sub(self.settings.patience) {
            self.queue.lose_patience(Millis(since));
        }
        self.serve();
        self.refuse_overdue();
        self.serve();
        self.lapse();
        self.earliest = self.look_again();
    }

    fn refuse_overdue(&mut self) {
        let overdue = self.queue.iter().filter_map(|(_, waiting)| {
            let is_overdue = waiting.until.is_some_and(|until| until <= self.now);
            is_overdue.then(|| (waiting.client, waiting.request, waiting.wants.clone()))
        });
        let overdue: Vec<(ClientId, RequestId, Claims)> = overdue.collect();
        for (client, request, wants) in overdue {
            self.queue.remove(client);
            let (device, asked, largest) = self.shortage(&wants);
            let refusal = Refusal::TimedOut {
                device,
                asked,
                largest,
            };
            self.effect(Effect::Refused {
                client,
                request,
                refusal,
            });
        }
    }

    fn lapse(&mut self) {
        let quiet = self.now.after(self.settings.shrink_within);
        for lease in self.leases.values_mut() {
            if lease.asked.as_ref().is_some_and(|(_, by)| *by <= self.now) {
                lease.asked = None;
                lease.left_alone_until = quiet;
            }
        }
    }

    /// The first time at which something happens by itself.
    fn look_again(&self) -> Option<Millis> {
        let leases = self.leases.values().flat_map(|lease| {
            let asked = lease.asked.as_ref().map(|(_, by)| *by);
            [lease.ends, asked, Some(lease.left_alone_until)]
        });
        let waiting = self.queue.iter().flat_map(|(rank, waiting)| {
            let due = waiting.since.after(self.settings.patience);
            [waiting.until, (!rank.blocks()).then_some(due)]
        });
        let times = leases.chain(waiting).chain([Some(self.opens)]).flatten();
        times.filter(|time| *time > self.now).min()
    }
}
