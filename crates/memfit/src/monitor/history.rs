//! What is remembered from one look to the next: the latest values of devices and processes, and peaks.
//!
//! Responsible for bounded memory of both: a process that is gone is forgotten. Not responsible for what is
//! shown.

use std::collections::{BTreeMap, VecDeque};

use super::look::Seen;

/// Looks that are remembered.
pub(crate) const LOOKS: usize = 60;

/// Values of the past, the latest last.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// The latest look.
    pub(super) now: Seen,
    devices: BTreeMap<String, Past>,
    processes: BTreeMap<(u32, u64), Past>,
}

/// The values of one thing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Past {
    pub(super) values: VecDeque<u64>,
    pub(super) peak: u64,
}

impl Past {
    fn add(&mut self, value: u64) {
        if self.values.len() == LOOKS {
            self.values.pop_front();
        }
        self.values.push_back(value);
        self.peak = self.peak.max(value);
    }
}

impl History {
    /// Takes in what was seen.
    pub(crate) fn add(&mut self, seen: Seen) {
        for (device, used) in used(&seen) {
            self.devices.entry(device).or_default().add(used);
        }
        let before = std::mem::take(&mut self.processes);
        let mut after = BTreeMap::new();
        for process in &seen.processes {
            let key = (process.pid, process.started);
            let mut past = before.get(&key).cloned().unwrap_or_default();
            past.add(
                process
                    .resident_bytes
                    .saturating_add(on_gpus(&seen, process.pid)),
            );
            after.insert(key, past);
        }
        self.processes = after;
        self.now = seen;
    }

    pub(super) fn device(&self, name: &str) -> Past {
        self.devices.get(name).cloned().unwrap_or_default()
    }

    pub(super) fn process(&self, pid: u32, started: u64) -> Past {
        self.processes
            .get(&(pid, started))
            .cloned()
            .unwrap_or_default()
    }
}

/// Devices and what is in use of each, by any process.
fn used(seen: &Seen) -> Vec<(String, u64)> {
    let pressure = &seen.pressure;
    let host = pressure.total_bytes.zip(pressure.available_bytes);
    let host = host.map(|(total, available)| ("host".to_owned(), total.saturating_sub(available)));
    let gpus = seen.gpus.iter();
    let gpus = gpus.map(|gpu| (gpu.device.clone(), gpu.used_bytes));
    let mut used: Vec<(String, u64)> = host.into_iter().chain(gpus).collect();
    // The broker may see a GPU that is not seen from here.
    for device in seen.broker.iter().flat_map(|status| &status.devices) {
        let is_new = used.iter().all(|(known, _)| *known != device.name);
        if let Some(bytes) = device.used_bytes.filter(|_| is_new) {
            used.push((device.name.clone(), bytes));
        }
    }
    used
}

/// What a process holds on all GPUs, as far as the driver tells.
pub(super) fn on_gpus(seen: &Seen, pid: u32) -> u64 {
    let processes = seen.gpus.iter().flat_map(|gpu| &gpu.processes);
    let own = processes.filter(|process| process.pid == pid);
    own.filter_map(|process| process.used_bytes)
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::look::Process;

    fn seen(resident: &[(u32, u64)]) -> Seen {
        let processes = resident.iter().map(|&(pid, resident_bytes)| Process {
            pid,
            started: 1,
            resident_bytes,
            ..Process::default()
        });
        Seen {
            processes: processes.collect(),
            ..Seen::default()
        }
    }

    #[test]
    fn the_latest_values_and_the_peak_are_kept_and_the_dead_forgotten() {
        let mut history = History::default();
        history.add(seen(&[(1, 500), (2, 7)]));
        for value in 0..100 {
            history.add(seen(&[(1, value)]));
        }
        let past = history.process(1, 1);
        assert_eq!((past.values.len(), past.values.back()), (LOOKS, Some(&99)));
        assert_eq!(past.peak, 500);
        assert_eq!(history.process(2, 1), Past::default());
        // Another process with the same number has a history of its own.
        assert_eq!(history.process(1, 2), Past::default());
    }
}
