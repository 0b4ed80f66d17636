//! Carrying out what the machine decided: written down, told, counted, logged.

use memfit_engine::share::lease::{Claims, ClientId, Effect, End, Lease, LeaseId, RequestId};
use serde_json::json;

use super::journal::LeaseEntry;
use super::process::milliseconds;
use super::server::Server;
use crate::lease::protocol::{Cause, Reply};

impl Server {
    pub(super) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Granted {
                client,
                request,
                lease,
                claims,
                commit_by,
            } => {
                self.granted((client, request), lease, &claims);
                let reply = Reply::Granted {
                    request: request.0,
                    lease: lease.0,
                    claims: self.devices.amounts(&claims),
                    commit_within_ms: commit_by.0.saturating_sub(milliseconds()),
                };
                self.put(client, &reply);
            }
            Effect::Changed {
                client,
                request,
                lease,
                revision,
                claims,
            } => {
                self.note(lease);
                let reply = Reply::Changed {
                    request: request.0,
                    lease: lease.0,
                    revision: revision.0,
                    claims: self.devices.amounts(&claims),
                };
                self.put(client, &reply);
            }
            Effect::Queued {
                client,
                request,
                ahead,
            } => {
                let reply = Reply::Queued {
                    request: request.0,
                    ahead: u64::try_from(ahead).unwrap_or(u64::MAX),
                };
                self.put(client, &reply);
            }
            Effect::Refused {
                client,
                request,
                refusal,
            } => {
                self.counters.refusals += 1;
                self.waiting_labels.remove(&(client, request));
                let refusal = self.devices.refusal(&refusal);
                let reply = Reply::Refused {
                    request: request.0,
                    refusal,
                };
                self.put(client, &reply);
            }
            Effect::Ended {
                client,
                request,
                lease,
                end,
            } => {
                self.end(client, lease, end);
                let reply = Reply::Ended {
                    request: request.map(|request| request.0),
                    lease: lease.0,
                    cause: cause(end),
                };
                self.put(client, &reply);
            }
            Effect::Adopted { client, lease, .. } => {
                if let Some(client) = self.clients.get_mut(&client) {
                    client.leases += 1;
                }
                self.note(lease);
                self.log
                    .info("adopted", json!({ "lease": lease.0, "client": client.0 }));
            }
            Effect::ShrinkAsked {
                client,
                lease,
                to,
                by,
            } => {
                self.counters.shrink_requests += 1;
                let to = self.devices.amounts(&to);
                let facts = json!({ "lease": lease.0, "client": client.0, "to": to });
                self.log.info("shrink_asked", facts);
                let reply = Reply::Shrink {
                    lease: lease.0,
                    to,
                    within_ms: by.0.saturating_sub(milliseconds()),
                };
                self.put(client, &reply);
            }
        }
    }

    fn granted(&mut self, name: (ClientId, RequestId), lease: LeaseId, claims: &Claims) {
        self.counters.grants += 1;
        if let Some(label) = self.waiting_labels.remove(&name) {
            self.labels.insert(lease, label);
        }
        if let Some(client) = self.clients.get_mut(&name.0) {
            client.leases += 1;
        }
        self.note(lease);
        self.log.detail("granted", || {
            let claims = self.devices.amounts(claims);
            json!({ "lease": lease.0, "client": name.0.0, "claims": claims })
        });
    }

    fn end(&mut self, client: ClientId, lease: LeaseId, end: End) {
        // A lost lease was no lease of the machine.
        if end != End::Lost {
            self.counters.ends += 1;
            self.labels.remove(&lease);
            self.journal.end(lease.0);
            if let Some(client) = self.clients.get_mut(&client) {
                client.leases = client.leases.saturating_sub(1);
            }
        }
        let facts = json!({ "lease": lease.0, "client": client.0, "cause": cause(end) });
        match end {
            End::Released => self.log.detail("ended", || facts),
            End::Lost => self.log.warn("lost", facts),
            End::Expired | End::ClientGone | End::NotPresented => self.log.info("ended", facts),
        }
    }

    /// Writes a lease down as it stands.
    fn note(&mut self, id: LeaseId) {
        let Some(lease) = self.machine.lease(id) else {
            // Ended by the same event; its end is written.
            return;
        };
        let entry = self.entry(id, lease);
        self.journal.lease(entry);
    }

    fn entry(&self, id: LeaseId, lease: &Lease) -> LeaseEntry {
        LeaseEntry {
            lease: id.0,
            client: lease.client.0,
            revision: lease.revision.0,
            claims: self.devices.amounts(&lease.claims),
            floor: self.devices.amounts(&lease.floor),
            priority: lease.priority.0,
            since: lease.since.0,
            is_committed: lease.is_committed,
            time_to_live: lease.time_to_live,
            label: self.labels.get(&id).cloned(),
        }
    }
}

const fn cause(end: End) -> Cause {
    match end {
        End::Released => Cause::Released,
        End::Expired => Cause::Expired,
        End::ClientGone => Cause::ClientGone,
        End::NotPresented => Cause::NotPresented,
        End::Lost => Cause::Lost,
    }
}
