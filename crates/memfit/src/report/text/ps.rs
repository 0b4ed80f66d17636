//! The text of `memfit ps`.

use std::fmt::Write as _;

use memfit_engine::bytes::Bytes;

use crate::lease::amounts::Amounts;
use crate::lease::status::{LeaseStatus, Status, WaitingStatus};
use crate::printer::Palette;
use crate::report::sharing::{PsDocument, occupied, shortfall};
use crate::report::table::{Align, Table};
use crate::report::words;

/// Devices, leases, requests that wait.
pub(crate) fn ps(document: &PsDocument, palette: Palette) -> String {
    let Some(status) = &document.broker else {
        return format!("no broker listens at {}\n", document.socket);
    };
    let mut text = devices(status, palette);
    if status.is_held_back {
        text.push_str("\nGrants are held back until clients of before the restart are back.\n");
    }
    if let Some(error) = &status.state_error {
        // Writing to a text does not fail.
        let _done = writeln!(
            text,
            "\nNothing is granted while it cannot be written down: {error}"
        );
    }
    text.push_str(&leases(&status.leases, palette));
    text.push_str(&waiting(&status.waiting, palette));
    text
}

fn devices(status: &Status, palette: Palette) -> String {
    use Align::{Left, Right};
    let mut table = Table::new(&[Left, Right, Right, Right, Right])
        .header(["device", "granted", "free", "capacity", "in use"]);
    for device in &status.devices {
        table.row([
            device.name.clone(),
            Bytes(device.granted_bytes).to_string(),
            Bytes(device.free_bytes).to_string(),
            Bytes(device.capacity_bytes).to_string(),
            device
                .used_bytes
                .map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string()),
        ]);
    }
    let mut text = table.render(0, palette);
    let short = status.devices.iter().filter_map(shortfall);
    let occupied = status.devices.iter().filter_map(occupied);
    let short: Vec<String> = short.chain(occupied).collect();
    if !short.is_empty() {
        let _done = writeln!(text, "\n{}", short.join("\n"));
    }
    if let Some(available) = status.pressure.available_bytes {
        let stalled = status.pressure.some_percent;
        let stalled = stalled
            .map(|percent| format!(", tasks waited for memory {percent:.1} % of the last 10 s"));
        let _done = writeln!(
            text,
            "\nhost: {} available{}",
            Bytes(available),
            stalled.unwrap_or_default()
        );
    }
    text
}

fn leases(leases: &[LeaseStatus], palette: Palette) -> String {
    use Align::{Left, Right};
    if leases.is_empty() {
        return "\nNothing is held.\n".to_owned();
    }
    let mut table = Table::new(&[Right, Right, Left, Left, Right, Right, Left])
        .header(["lease", "pid", "name", "holds", "priority", "for", "state"]);
    for lease in leases {
        let state = match &lease.asked {
            Some(to) => format!("asked to shrink to {}", amounts(to)),
            None => lease.state.clone(),
        };
        table.row([
            lease.lease.to_string(),
            lease.pid.to_string(),
            named(&lease.name, lease.label.as_deref()),
            amounts(&lease.claims),
            lease.priority.to_string(),
            time(lease.held_seconds),
            state,
        ]);
    }
    format!("\n{}", table.render(0, palette))
}

fn waiting(waiting: &[WaitingStatus], palette: Palette) -> String {
    use Align::{Left, Right};
    if waiting.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[Right, Left, Left, Right, Right, Right, Left]).header([
        "pid",
        "name",
        "waits for",
        "priority",
        "since",
        "still",
        "turn",
    ]);
    for request in waiting {
        let left = request
            .left_seconds
            .map_or_else(|| "no end".to_owned(), time);
        let turn = match (request.is_next, request.overtaken_count) {
            (true, _) => "next".to_owned(),
            (false, 0) => String::new(),
            (false, count) => format!("overtaken {count} times"),
        };
        table.row([
            request.pid.to_string(),
            named(&request.name, request.label.as_deref()),
            amounts(&request.claims),
            request.priority.to_string(),
            time(request.waited_seconds),
            left,
            turn,
        ]);
    }
    format!("\n{}", table.render(0, palette))
}

/// Names come from other processes.
fn named(name: &str, label: Option<&str>) -> String {
    let text = match label {
        Some(label) => format!("{name} ({label})"),
        None => name.to_owned(),
    };
    words::inert(&text, 60)
}

fn amounts(amounts: &Amounts) -> String {
    if amounts.is_empty() {
        return "nothing".to_owned();
    }
    let parts = amounts
        .iter()
        .map(|(device, bytes)| format!("{device} {}", Bytes(*bytes)));
    parts.collect::<Vec<_>>().join(", ")
}

/// `4.2 s`, `3 min`, `2.5 h`.
fn time(seconds: f64) -> String {
    if seconds < 100.0 {
        format!("{seconds:.1} s")
    } else if seconds < 6000.0 {
        format!("{:.0} min", seconds / 60.0)
    } else {
        format!("{:.1} h", seconds / 3600.0)
    }
}

#[cfg(test)]
mod tests {
    use memfit_memory::pressure::Pressure;

    use super::*;
    use crate::lease::status::DeviceStatus;

    fn document() -> PsDocument {
        let host = |bytes| Amounts::from([("host".to_owned(), bytes)]);
        let lease = LeaseStatus {
            lease: 4,
            pid: 100,
            name: "train.py".to_owned(),
            label: Some("bert\u{1b}[2J".to_owned()),
            claims: host(6 << 30),
            state: "committed".to_owned(),
            held_seconds: 61.04,
            ..LeaseStatus::default()
        };
        let waiting = WaitingStatus {
            pid: 101,
            name: "serve.py".to_owned(),
            claims: host(12 << 30),
            priority: 5,
            waited_seconds: 125.0,
            overtaken_count: 3,
            ..WaitingStatus::default()
        };
        let status = Status {
            devices: vec![DeviceStatus {
                name: "host".to_owned(),
                capacity_bytes: 16 << 30,
                granted_bytes: 6 << 30,
                free_bytes: 10 << 30,
                total_bytes: Some(24 << 30),
                used_bytes: Some(15 << 30),
                occupied_bytes: Some(2 << 30),
            }],
            leases: vec![lease],
            waiting: vec![waiting],
            pressure: Pressure {
                available_bytes: Some(9 << 30),
                some_percent: Some(1.25),
                ..Pressure::default()
            },
            ..Status::default()
        };
        PsDocument::new(std::path::Path::new("/run/broker.sock"), Some(status))
    }

    #[test]
    fn who_holds_and_who_waits_stand_in_tables_without_control_characters() {
        insta::assert_snapshot!(ps(&document(), Palette::PLAIN), @"
        device   granted       free   capacity     in use
        host    6.00 GiB  10.00 GiB  16.00 GiB  15.00 GiB

        host: 1.00 GiB more could be granted than is free: memory without a lease is in use
        host: 2.00 GiB are not granted while others than lease holders use them

        host: 9.00 GiB available, tasks waited for memory 1.2 % of the last 10 s

        lease  pid  name                 holds          priority     for  state
            4  100  train.py (bert?[2J)  host 6.00 GiB         0  61.0 s  committed

        pid  name      waits for       priority  since   still  turn
        101  serve.py  host 12.00 GiB         5  2 min  no end  overtaken 3 times
        ");
    }

    #[test]
    fn without_a_broker_it_says_where_none_is() {
        let none = PsDocument::new(std::path::Path::new("/run/broker.sock"), None);
        assert_eq!(
            ps(&none, Palette::PLAIN),
            "no broker listens at /run/broker.sock\n"
        );
    }
}
