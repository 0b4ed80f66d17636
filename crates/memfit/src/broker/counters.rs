//! What happened so far, and its form for Prometheus.

use std::fmt::Write as _;

use crate::lease::status::{DeviceStatus, Status};

/// What is told of a device, and what it is.
type OfDevice = (&'static str, &'static str, fn(&DeviceStatus) -> Option<u64>);

const OF_DEVICES: [OfDevice; 5] = [
    ("capacity_bytes", "Bytes that may be granted.", |device| {
        Some(device.capacity_bytes)
    }),
    ("granted_bytes", "Bytes that are granted.", |device| {
        Some(device.granted_bytes)
    }),
    (
        "occupied_bytes",
        "Bytes that would be granted if others had not taken them.",
        |device| device.occupied_bytes,
    ),
    (
        "device_total_bytes",
        "All memory of the device.",
        |device| device.total_bytes,
    ),
    (
        "device_used_bytes",
        "Bytes in use, by any process.",
        |device| device.used_bytes,
    ),
];

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) requests: u64,
    pub(crate) grants: u64,
    pub(crate) refusals: u64,
    pub(crate) ends: u64,
    pub(crate) shrink_requests: u64,
    pub(crate) faults: u64,
}

/// The numbers in Prometheus' text format: a status, the number of clients, and the counts.
pub(super) fn metrics(status: &Status, clients: usize, counters: Counters) -> String {
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, values: &[(String, String)]| {
        // Writing to a text does not fail.
        let _done = writeln!(
            text,
            "# HELP memfit_{name} {help}\n# TYPE memfit_{name} {kind}"
        );
        for (labels, value) in values {
            let _done = writeln!(text, "memfit_{name}{labels} {value}");
        }
    };
    let one = |value: &dyn ToString| vec![(String::new(), value.to_string())];
    let of_devices = |value: &dyn Fn(&DeviceStatus) -> Option<u64>| {
        let values = status.devices.iter().filter_map(|device| {
            // Names of devices need no escapes.
            let labels = format!("{{device=\"{}\"}}", device.name);
            value(device).map(|value| (labels, value.to_string()))
        });
        values.collect::<Vec<_>>()
    };
    for (name, help, value) in OF_DEVICES {
        family(name, "gauge", help, &of_devices(&value));
    }
    family(
        "leases",
        "gauge",
        "Leases that are held.",
        &one(&status.leases.len()),
    );
    family(
        "waiting",
        "gauge",
        "Requests that wait.",
        &one(&status.waiting.len()),
    );
    family(
        "clients",
        "gauge",
        "Clients, connected or away.",
        &one(&clients),
    );
    let longest = status
        .waiting
        .iter()
        .map(|waiting| waiting.waited_seconds)
        .fold(0.0, f64::max);
    family(
        "longest_wait_seconds",
        "gauge",
        "Longest wait so far of those that wait.",
        &one(&longest),
    );
    for (name, help, value) in [
        ("requests_total", "Requests read.", counters.requests),
        ("grants_total", "Leases granted.", counters.grants),
        ("refusals_total", "Requests refused.", counters.refusals),
        ("ended_total", "Leases ended.", counters.ends),
        (
            "shrink_requests_total",
            "Holders asked to shrink.",
            counters.shrink_requests,
        ),
        (
            "faults_total",
            "Connections ended for what they sent.",
            counters.faults,
        ),
    ] {
        family(name, "counter", help, &one(&value));
    }
    if let Some(available) = status.pressure.available_bytes {
        family(
            "host_available_bytes",
            "gauge",
            "Host memory to be had without swapping.",
            &one(&available),
        );
    }
    if let Some(stalled) = status.pressure.some_percent {
        family(
            "host_stalled_percent",
            "gauge",
            "Share of ten seconds in which some task waited for memory.",
            &one(&stalled),
        );
    }
    text
}
