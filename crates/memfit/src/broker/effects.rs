//! Carrying out what the machine decided: what is to be written down; then told, counted, logged.

use memfit_engine::share::lease::{Claims, ClientId, Effect, End, LeaseId, RequestId};
use serde_json::json;

use super::journal::{Change, LeaseEntry};
use super::server::Server;
use crate::boot::milliseconds;
use crate::lease::protocol::{Cause, Reply};

impl Server {
    /// What the state file has to say of these effects, of which the machine knows already.
    pub(super) fn changes(&self, effects: &[Effect]) -> Vec<Change> {
        let changes = effects.iter().filter_map(|effect| match effect {
            Effect::Granted {
                client,
                request,
                lease,
                ..
            } => self.entry(*lease, self.waiting_labels.get(&(*client, *request))),
            Effect::Changed { lease, .. } | Effect::Adopted { lease, .. } => {
                self.entry(*lease, self.labels.get(lease))
            }
            // A lost lease was no lease of the machine.
            Effect::Ended { lease, end, .. } if *end != End::Lost => Some(Change::End(lease.0)),
            Effect::Ended { .. }
            | Effect::Queued { .. }
            | Effect::Refused { .. }
            | Effect::ShrinkAsked { .. } => None,
        });
        changes.collect()
    }

    /// A lease as it stands; nothing where the same event ended it.
    fn entry(&self, id: LeaseId, label: Option<&String>) -> Option<Change> {
        let lease = self.machine.lease(id)?;
        Some(Change::Lease(LeaseEntry {
            lease: id.0,
            client: lease.client.0,
            revision: lease.revision.0,
            claims: self.devices.amounts(&lease.claims),
            floor: self.devices.amounts(&lease.floor),
            priority: lease.priority.0,
            since: lease.since.0,
            is_committed: lease.is_committed,
            time_to_live: lease.time_to_live,
            label: label.cloned(),
        }))
    }

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
                self.mention(client, &reply);
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
