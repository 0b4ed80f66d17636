//! What others than lease holders have taken of the devices, for a broker that grants no more than is free.
//!
//! Responsible for what follows from what the kernel and NVML tell; only with `--only-free`. Not responsible
//! for grants: the machine waits for this memory as it does for what is granted.
//!
//! What is free now is not all to be had: holders have still to take what they were granted. So of a
//! device as much can be granted as is free less what holders have not taken yet. What the broker could
//! grant beyond that is occupied. A holder that takes more than it leases counts as one of the others for the rest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use memfit_engine::bytes::Bytes;
use memfit_engine::share::lease::{Device, Event};
use memfit_memory::pressure;

use super::server::Server;
use crate::device::Gpu;

/// How often to look.
pub(super) const EVERY: Duration = Duration::from_millis(500);
/// How long a look stands for when somebody asks for memory.
const FRESH: Duration = Duration::from_millis(100);
/// Amounts are told in whole ones: memory in use is never still.
const STEP: u64 = 1 << 20;

/// Memory of one device.
#[derive(Debug, Clone, Copy)]
struct Taken {
    /// Of the capacity, what is not granted.
    ungranted: Bytes,
    /// What is free now, granted or not.
    free: Bytes,
    /// What holders were granted and have not taken yet.
    unused: Bytes,
}

impl Taken {
    /// Bytes that could be granted and are not there.
    fn occupied(self) -> Bytes {
        let missing = self.ungranted - (self.free - self.unused);
        Bytes(missing.0.div_ceil(STEP).saturating_mul(STEP))
    }
}

/// What processes were granted and have not taken; one that cannot be looked into has taken all.
fn unused(leased: &BTreeMap<u32, Bytes>, taken_by: impl Fn(u32) -> Option<u64>) -> Bytes {
    let each = leased.iter().map(|(pid, leased)| {
        let taken = taken_by(*pid).map_or(*leased, Bytes);
        *leased - taken
    });
    each.sum()
}

/// What a process has taken of a GPU, where the driver tells: in a container it may tell of none.
fn taken_on(gpu: &Gpu, pid: u32) -> Option<u64> {
    let mut processes = gpu.processes.iter();
    match processes.find(|process| process.pid == pid) {
        Some(process) => process.used_bytes,
        None => (!gpu.processes.is_empty()).then_some(0),
    }
}

impl Server {
    /// Looks, if grants depend on it and the last look is no longer fresh.
    pub(super) fn look_before_granting(&mut self) {
        let is_fresh = self.looked.is_some_and(|looked| looked.elapsed() < FRESH);
        if self.only_free && !is_fresh {
            self.look();
        }
    }

    /// Tells the machine what others have taken. What is unknown of a device counts as nothing; while a driver is
    /// slow to answer it is what it was.
    pub(super) fn look(&mut self) {
        let now = Instant::now();
        self.looked = Some(now);
        let devices: Vec<(Device, String)> = self
            .devices
            .names()
            .map(|(device, name)| (device, name.to_owned()))
            .collect();
        for (device, name) in devices {
            let bytes = match self.taken(device, &name, now) {
                Some(taken) => taken.occupied(),
                None if name != "host" && self.usage.is_awaited() => continue,
                None => Bytes::ZERO,
            };
            if bytes != self.machine.occupied(device) {
                self.apply(Event::Occupied { device, bytes });
            }
        }
        self.settle();
    }

    fn taken(&mut self, device: Device, name: &str, now: Instant) -> Option<Taken> {
        let leased = self.leased(device);
        let (free, unused) = if name == "host" {
            let free = pressure::read().available_bytes?;
            (free, unused(&leased, pressure::private_bytes))
        } else {
            let gpu = self.usage.at(now).get(name)?;
            let free = gpu.total_bytes.saturating_sub(gpu.used_bytes);
            (free, unused(&leased, |pid| taken_on(gpu, pid)))
        };
        Some(Taken {
            ungranted: self.machine.capacity(device) - self.machine.granted(device),
            free: Bytes(free),
            unused,
        })
    }

    /// What each process leases of a device.
    fn leased(&self, device: Device) -> BTreeMap<u32, Bytes> {
        let mut leased: BTreeMap<u32, Bytes> = BTreeMap::new();
        for (_, lease) in self.machine.leases() {
            if let Some(client) = self.clients.get(&lease.client) {
                *leased.entry(client.process.pid).or_default() += lease.claims.on(device);
            }
        }
        leased
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::GpuProcess;

    const GIB: u64 = 1 << 30;

    fn occupied(ungranted: u64, free: u64, unused: u64) -> u64 {
        let taken = Taken {
            ungranted: Bytes(ungranted),
            free: Bytes(free),
            unused: Bytes(unused),
        };
        taken.occupied().0
    }

    #[test]
    fn what_is_free_and_not_promised_can_be_granted() {
        assert_eq!(occupied(10 * GIB, 10 * GIB, 0), 0);
        assert_eq!(occupied(10 * GIB, 30 * GIB, 20 * GIB), 0);
        assert_eq!(occupied(10 * GIB, 8 * GIB, 0), 2 * GIB);
        // Three are promised to holders that have not taken them.
        assert_eq!(occupied(10 * GIB, 8 * GIB, 3 * GIB), 5 * GIB);
        assert_eq!(occupied(10 * GIB, 8 * GIB, 9 * GIB), 10 * GIB);
        assert_eq!(occupied(10 * GIB, 0, u64::MAX), 10 * GIB);
        assert_eq!(occupied(0, 0, 0), 0);
        // Rounded up.
        assert_eq!(occupied(GIB + 1, GIB, 0), STEP);
        assert_eq!(occupied(u64::MAX, 0, 0), u64::MAX);
    }

    #[test]
    fn a_process_that_the_driver_lists_not_among_others_has_taken_nothing() {
        let mut gpu = Gpu::default();
        assert_eq!(taken_on(&gpu, 1), None);
        let process = |pid, used_bytes| GpuProcess { pid, used_bytes };
        gpu.processes = vec![process(1, Some(7)), process(2, None)];
        let taken = [1, 2, 3].map(|pid| taken_on(&gpu, pid));
        assert_eq!(taken, [Some(7), None, Some(0)]);
    }

    #[test]
    fn who_was_granted_more_than_it_took_has_the_rest_coming() {
        let leased = BTreeMap::from([(1, Bytes(10)), (2, Bytes(10)), (3, Bytes(10))]);
        let taken_by = |pid| match pid {
            1 => Some(4),
            2 => Some(25),
            _ => None,
        };
        assert_eq!(unused(&leased, taken_by), Bytes(6));
    }
}
