//! Who holds what, in words that go out.

use std::time::Instant;

use memfit_engine::share::lease::Millis;
use memfit_memory::pressure::{self, Pressure};

use super::server::Server;
use crate::boot::milliseconds;
use crate::device::Memory;
use crate::lease::status::{DeviceStatus, LeaseStatus, Status, WaitingStatus};

impl Server {
    /// The state as `memfit ps` shows it.
    pub(crate) fn status(&mut self) -> Status {
        let now = Millis(milliseconds());
        let pressure = pressure::read();
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            up_seconds: seconds(now.0, self.began),
            is_held_back: now < self.machine.opens(),
            devices: self.device_status(&pressure),
            leases: self.lease_status(now),
            waiting: self.waiting_status(now),
            pressure,
            state_error: self.journal.error.clone(),
        }
    }

    fn device_status(&mut self, pressure: &Pressure) -> Vec<DeviceStatus> {
        let gpus = self.usage.at(Instant::now());
        let devices = self.devices.names().map(|(device, name)| {
            let memory = match name {
                "host" => host(pressure),
                gpu => gpus.get(gpu).map(|gpu| Memory {
                    total_bytes: gpu.total_bytes,
                    used_bytes: gpu.used_bytes,
                }),
            };
            let (capacity, granted) = (self.machine.capacity(device), self.machine.granted(device));
            DeviceStatus {
                name: name.to_owned(),
                capacity_bytes: capacity.0,
                granted_bytes: granted.0,
                free_bytes: self.machine.free(device).0,
                occupied_bytes: self.only_free.then(|| self.machine.occupied(device).0),
                total_bytes: memory.map(|memory| memory.total_bytes),
                used_bytes: memory.map(|memory| memory.used_bytes),
            }
        });
        devices.collect()
    }

    fn lease_status(&self, now: Millis) -> Vec<LeaseStatus> {
        let leases = self.machine.leases().map(|(id, lease)| {
            let client = self.clients.get(&lease.client);
            let is_away = client.is_none_or(|client| client.outbox.is_none());
            let state = match (is_away, lease.is_committed) {
                (true, _) => "away",
                (false, true) => "committed",
                (false, false) => "reserved",
            };
            LeaseStatus {
                lease: id.0,
                pid: client.map_or(0, |client| client.process.pid),
                name: client.map(|client| client.name.clone()).unwrap_or_default(),
                label: self.labels.get(&id).cloned(),
                claims: self.devices.amounts(&lease.claims),
                floor: self.devices.amounts(&lease.floor),
                priority: lease.priority.0,
                revision: lease.revision.0,
                state: state.to_owned(),
                held_seconds: seconds(now.0, lease.since.0),
                asked: lease.asked.as_ref().map(|(to, _)| self.devices.amounts(to)),
            }
        });
        leases.collect()
    }

    fn waiting_status(&self, now: Millis) -> Vec<WaitingStatus> {
        let waiting = self.machine.waiting().map(|(waiting, is_next)| {
            let client = self.clients.get(&waiting.client);
            let name = (waiting.client, waiting.request);
            WaitingStatus {
                pid: client.map_or(0, |client| client.process.pid),
                name: client.map(|client| client.name.clone()).unwrap_or_default(),
                label: self.waiting_labels.get(&name).cloned(),
                claims: self.devices.amounts(&waiting.wants),
                priority: waiting.priority.0,
                waited_seconds: seconds(now.0, waiting.since.0),
                left_seconds: waiting.until.map(|until| seconds(until.0, now.0)),
                overtaken_count: waiting.overtaken,
                is_next,
            }
        });
        waiting.collect()
    }
}

/// The host's memory; what could be had without swapping is not in use.
fn host(pressure: &Pressure) -> Option<Memory> {
    let (total_bytes, available) = pressure.total_bytes.zip(pressure.available_bytes)?;
    Some(Memory {
        total_bytes,
        used_bytes: total_bytes.saturating_sub(available),
    })
}

fn seconds(later: u64, earlier: u64) -> f64 {
    std::time::Duration::from_millis(later.saturating_sub(earlier)).as_secs_f64()
}
