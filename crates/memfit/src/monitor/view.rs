//! What is shown, as plain data: devices and processes in an order, with names that do no harm.
//!
//! Responsible for joining what broker, driver and `/proc` say of one process, for the order and for which rows
//! there are. Not responsible for drawing (`draw.rs`).

use std::cmp::Reverse;
use std::collections::BTreeMap;

use memfit_engine::bytes::Bytes;
use serde::Serialize;

use super::history::{History, on_gpus};
use crate::report::sharing::{occupied, shortfall};
use crate::report::words;

/// Version of the JSON.
const SCHEMA_VERSION: u32 = 1;
/// Processes that are shown at most; those that lease or wait come first.
const MOST_PROCESSES: usize = 200;
/// A process with less is shown only if it leases or waits.
const SMALLEST: u64 = 16 << 20;

/// The order of processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sort {
    /// Those that wait, then those that lease, each by what they use: what a person looks for.
    #[default]
    Need,
    /// What they use now, on the host and on GPUs.
    Memory,
    /// What they lease.
    Leased,
    /// The most they used since the first look.
    Peak,
    /// How long they wait.
    Waiting,
}

impl Sort {
    /// All of them with their keys.
    pub(crate) const ALL: [(char, Self, &str); 5] = [
        ('n', Self::Need, "need"),
        ('m', Self::Memory, "memory"),
        ('l', Self::Leased, "leased"),
        ('p', Self::Peak, "peak"),
        ('w', Self::Waiting, "waiting"),
    ];
}

/// What `memfit top` shows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct View {
    pub(crate) schema_version: u32,
    /// Since the first look.
    pub(crate) seconds: f64,
    /// Whether a broker runs.
    pub(crate) has_broker: bool,
    pub(crate) lease_count: usize,
    pub(crate) waiting_count: usize,
    pub(crate) sort: Sort,
    pub(crate) devices: Vec<DeviceRow>,
    pub(crate) processes: Vec<ProcessRow>,
    /// Sentences worth reading.
    pub(crate) notes: Vec<String>,
}

/// A device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct DeviceRow {
    /// `host` or `cuda:0`.
    pub(crate) device: String,
    /// What its maker calls it.
    pub(crate) name: String,
    pub(crate) total_bytes: Option<Bytes>,
    /// In use, by any process.
    pub(crate) used_bytes: Option<Bytes>,
    /// Granted by the broker, and what it may grant.
    pub(crate) granted_bytes: Option<Bytes>,
    pub(crate) grantable_bytes: Option<Bytes>,
    /// `used_bytes` at the latest looks.
    pub(crate) history: Vec<u64>,
}

/// A process.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct ProcessRow {
    pub(crate) pid: u32,
    /// As it calls itself, without characters that a terminal obeys.
    pub(crate) name: String,
    /// Leased on all devices.
    pub(crate) leased_bytes: Bytes,
    /// Resident memory of its own.
    pub(crate) host_bytes: Bytes,
    /// On all GPUs, as far as the driver tells.
    pub(crate) gpu_bytes: Bytes,
    /// The most of both at one look since the first.
    pub(crate) peak_bytes: Bytes,
    /// Bytes that it waits for, and for how long so far.
    pub(crate) waits_for_bytes: Option<Bytes>,
    pub(crate) waited_seconds: Option<f64>,
    /// Whether it was asked to shrink.
    pub(crate) is_asked: bool,
    /// Host and GPU bytes at the latest looks.
    pub(crate) history: Vec<u64>,
}

impl ProcessRow {
    /// What it uses now.
    pub(crate) fn used(&self) -> Bytes {
        Bytes(self.host_bytes.0.saturating_add(self.gpu_bytes.0))
    }

    /// What it does with the broker, in words.
    pub(crate) fn state(&self) -> String {
        match (self.waits_for_bytes, self.waited_seconds) {
            (Some(bytes), Some(seconds)) => format!("waits for {bytes}, {seconds:.0} s"),
            _ if self.is_asked => "asked to shrink".to_owned(),
            _ if self.leased_bytes != Bytes::ZERO => "leases".to_owned(),
            _ => String::new(),
        }
    }

    const fn is_client(&self) -> bool {
        self.leased_bytes.0 > 0 || self.waits_for_bytes.is_some()
    }
}

impl View {
    /// What there is to show, in this order.
    pub(crate) fn new(history: &History, sort: Sort) -> Self {
        let seen = &history.now;
        let status = seen.broker.as_ref();
        let mut notes: Vec<String> = seen.problem.iter().cloned().collect();
        if status.is_some_and(|status| status.is_held_back) {
            notes.push("grants wait until clients of before the restart are back".to_owned());
        }
        let devices_of_broker = status.iter().flat_map(|status| &status.devices);
        notes.extend(devices_of_broker.clone().filter_map(shortfall));
        notes.extend(devices_of_broker.filter_map(occupied));
        Self {
            schema_version: SCHEMA_VERSION,
            seconds: seen.seconds,
            has_broker: status.is_some(),
            lease_count: status.map_or(0, |status| status.leases.len()),
            waiting_count: status.map_or(0, |status| status.waiting.len()),
            sort,
            devices: devices(history),
            processes: processes(history, sort),
            notes: notes.iter().map(|note| words::inert(note, 200)).collect(),
        }
    }
}

fn devices(history: &History) -> Vec<DeviceRow> {
    let seen = &history.now;
    let past = |device: &str| history.device(device).values.into_iter().collect();
    let (total, available) = (seen.pressure.total_bytes, seen.pressure.available_bytes);
    let mut rows = vec![DeviceRow {
        device: "host".to_owned(),
        total_bytes: total.map(Bytes),
        used_bytes: total
            .zip(available)
            .map(|(total, available)| Bytes(total.saturating_sub(available))),
        history: past("host"),
        ..DeviceRow::default()
    }];
    rows.extend(seen.gpus.iter().map(|gpu| DeviceRow {
        device: gpu.device.clone(),
        name: words::inert(&gpu.name, 40),
        total_bytes: Some(Bytes(gpu.total_bytes)),
        used_bytes: Some(Bytes(gpu.used_bytes)),
        history: past(&gpu.device),
        ..DeviceRow::default()
    }));
    for granted in seen.broker.iter().flat_map(|status| &status.devices) {
        let known = rows.iter().position(|row| row.device == granted.name);
        let place = known.unwrap_or_else(|| {
            rows.push(DeviceRow {
                device: words::inert(&granted.name, 20),
                history: past(&granted.name),
                ..DeviceRow::default()
            });
            rows.len() - 1
        });
        let row = &mut rows[place];
        row.granted_bytes = Some(Bytes(granted.granted_bytes));
        row.grantable_bytes = Some(Bytes(granted.capacity_bytes));
        // The broker may see a GPU that is not seen from here.
        row.total_bytes = row.total_bytes.or(granted.total_bytes.map(Bytes));
        row.used_bytes = row.used_bytes.or(granted.used_bytes.map(Bytes));
    }
    rows
}

fn processes(history: &History, sort: Sort) -> Vec<ProcessRow> {
    let seen = &history.now;
    let mut rows: BTreeMap<u32, ProcessRow> = BTreeMap::new();
    for process in &seen.processes {
        let past = history.process(process.pid, process.started);
        let row = ProcessRow {
            pid: process.pid,
            name: words::inert(&process.name, 60),
            host_bytes: Bytes(process.resident_bytes),
            gpu_bytes: Bytes(on_gpus(seen, process.pid)),
            peak_bytes: Bytes(past.peak),
            history: past.values.into_iter().collect(),
            ..ProcessRow::default()
        };
        rows.insert(process.pid, row);
    }
    // Clients of the broker may live where `/proc` does not show them.
    let unseen = |pid, name: &str| ProcessRow {
        pid,
        name: words::inert(name, 60),
        ..ProcessRow::default()
    };
    if let Some(status) = &seen.broker {
        for lease in &status.leases {
            let row = rows
                .entry(lease.pid)
                .or_insert_with(|| unseen(lease.pid, &lease.name));
            let bytes = lease
                .claims
                .values()
                .fold(0, |sum: u64, part| sum.saturating_add(*part));
            row.leased_bytes = Bytes(row.leased_bytes.0.saturating_add(bytes));
            row.is_asked |= lease.asked.is_some();
        }
        for waiting in &status.waiting {
            let row = rows
                .entry(waiting.pid)
                .or_insert_with(|| unseen(waiting.pid, &waiting.name));
            let bytes = waiting
                .claims
                .values()
                .fold(0, |sum: u64, part| sum.saturating_add(*part));
            let before = row.waits_for_bytes.map_or(0, |bytes| bytes.0);
            row.waits_for_bytes = Some(Bytes(before.saturating_add(bytes)));
            let longest = row
                .waited_seconds
                .unwrap_or(0.0)
                .max(waiting.waited_seconds);
            row.waited_seconds = Some(longest);
        }
    }
    let mut rows: Vec<ProcessRow> = rows
        .into_values()
        .filter(|row| row.is_client() || row.used().0 >= SMALLEST)
        .collect();
    order(&mut rows, Sort::Need);
    rows.truncate(MOST_PROCESSES);
    order(&mut rows, sort);
    rows
}

/// Puts rows in order; of equals the lower number comes first.
fn order(rows: &mut [ProcessRow], sort: Sort) {
    let waited = |row: &ProcessRow| {
        // A time that is no number is none.
        let milliseconds = row.waited_seconds.map_or(-1.0, |seconds| seconds * 1000.0);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a cast of a float saturates, and milliseconds suffice for an order"
        )]
        let milliseconds = milliseconds as i64;
        milliseconds
    };
    rows.sort_by_cached_key(|row| {
        let used = row.used();
        let key = match sort {
            Sort::Need => {
                let class = match (row.waits_for_bytes.is_some(), row.leased_bytes) {
                    (true, _) => 2,
                    (false, Bytes(0)) => 0,
                    (false, _) => 1,
                };
                (class, used)
            }
            Sort::Memory => (0, used),
            Sort::Leased => (0, row.leased_bytes),
            Sort::Peak => (0, row.peak_bytes),
            Sort::Waiting => (waited(row), used),
        };
        (Reverse(key), row.pid)
    });
}

#[cfg(test)]
pub(super) mod tests {
    use memfit_memory::pressure::Pressure;

    use super::*;
    use crate::device::{Gpu, GpuProcess};
    use crate::lease::status::{DeviceStatus, LeaseStatus, Status, WaitingStatus};
    use crate::monitor::look::{Process, Seen};

    const GIB: u64 = 1 << 30;

    /// A machine with a GPU, a broker, a holder, one that waits and one that knows nothing of memfit.
    pub(in crate::monitor) fn busy(looks: u64) -> History {
        let process = |pid, name: &str, resident_bytes| Process {
            pid,
            started: 1,
            name: name.to_owned(),
            resident_bytes,
        };
        let host = |bytes| [("host".to_owned(), bytes)].into();
        let mut history = History::default();
        for look in 1..=looks {
            history.add(Seen {
                seconds: 1.0,
                broker: Some(Status {
                    devices: vec![DeviceStatus {
                        name: "host".to_owned(),
                        capacity_bytes: 16 * GIB,
                        granted_bytes: 6 * GIB,
                        free_bytes: 10 * GIB,
                        ..DeviceStatus::default()
                    }],
                    leases: vec![LeaseStatus {
                        pid: 100,
                        claims: host(6 * GIB),
                        asked: Some(host(4 * GIB)),
                        ..LeaseStatus::default()
                    }],
                    waiting: vec![WaitingStatus {
                        pid: 101,
                        name: "elsewhere\u{1b}[2J".to_owned(),
                        claims: host(12 * GIB),
                        waited_seconds: 61.4,
                        ..WaitingStatus::default()
                    }],
                    ..Status::default()
                }),
                gpus: vec![Gpu {
                    device: "cuda:0".to_owned(),
                    name: "NVIDIA Made Up 80GB".to_owned(),
                    total_bytes: 80 * GIB,
                    used_bytes: 20 * GIB,
                    processes: vec![GpuProcess {
                        pid: 102,
                        used_bytes: Some(19 * GIB),
                    }],
                }],
                pressure: Pressure {
                    total_bytes: Some(24 * GIB),
                    available_bytes: Some(24 * GIB - look * GIB),
                    ..Pressure::default()
                },
                processes: vec![
                    process(7, "sh", 1 << 20),
                    process(100, "python3 train.py", look * GIB),
                    process(102, "python3\u{1b}]0;owned\u{7}\u{202e}yp.evil", 2 * GIB),
                ],
                ..Seen::default()
            });
        }
        history
    }

    fn pids(sort: Sort) -> Vec<u32> {
        let view = View::new(&busy(3), sort);
        view.processes.iter().map(|row| row.pid).collect()
    }

    #[test]
    fn who_waits_comes_first_then_who_leases_then_who_uses_most() {
        assert_eq!(pids(Sort::Need), [101, 100, 102]);
        assert_eq!(pids(Sort::Memory), [102, 100, 101]);
        assert_eq!(pids(Sort::Leased), [100, 101, 102]);
        assert_eq!(pids(Sort::Waiting), [101, 102, 100]);
    }

    #[test]
    fn what_three_sources_say_of_one_process_is_one_row() {
        let view = View::new(&busy(3), Sort::Memory);
        let rows = &view.processes;
        assert_eq!(
            (rows[0].gpu_bytes, rows[0].host_bytes),
            (Bytes(19 * GIB), Bytes(2 * GIB))
        );
        assert_eq!(
            (rows[1].leased_bytes, rows[1].peak_bytes),
            (Bytes(6 * GIB), Bytes(3 * GIB))
        );
        assert_eq!(rows[1].state(), "asked to shrink");
        assert_eq!(rows[2].state(), "waits for 12.00 GiB, 61 s");
    }

    #[test]
    fn names_of_processes_move_no_cursor_and_turn_no_text() {
        let view = View::new(&busy(1), Sort::Need);
        for row in &view.processes {
            assert!(
                !row.name.chars().any(|c| c.is_control() || c == '\u{202e}'),
                "{:?}",
                row.name
            );
        }
    }

    #[test]
    fn a_gpu_that_only_the_broker_sees_has_its_use_and_history() {
        let mut history = History::default();
        for look in 1..=3 {
            let mut seen = busy(1).now;
            let broker = seen.broker.as_mut().unwrap();
            broker.devices.push(DeviceStatus {
                name: "cuda:7".to_owned(),
                capacity_bytes: 40 * GIB,
                free_bytes: 40 * GIB,
                total_bytes: Some(40 * GIB),
                used_bytes: Some(look * GIB),
                ..DeviceStatus::default()
            });
            history.add(seen);
        }
        let view = View::new(&history, Sort::Need);
        let row = view.devices.last().unwrap();
        assert_eq!(row.device, "cuda:7");
        assert_eq!(row.used_bytes, Some(Bytes(3 * GIB)));
        assert_eq!(row.history, [GIB, 2 * GIB, 3 * GIB]);
        assert_eq!(
            view.notes,
            [
                "cuda:7: 3.00 GiB more could be granted than is free: memory without a lease is in use"
            ]
        );
    }

    #[test]
    fn an_empty_machine_has_a_view() {
        let view = View::new(&History::default(), Sort::Need);
        assert!(!view.has_broker && view.processes.is_empty());
        assert_eq!(view.devices.len(), 1);
    }
}
