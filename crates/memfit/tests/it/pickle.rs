//! Memory snapshots as files, from JSON values.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// A pickle of protocol 4, as far as JSON reaches.
pub(crate) fn dumps(value: &Value) -> Vec<u8> {
    let mut pickle = b"\x80\x04".to_vec();
    write(value, &mut pickle);
    pickle.push(b'.');
    pickle
}

fn write(value: &Value, pickle: &mut Vec<u8>) {
    match value {
        Value::Null => pickle.push(b'N'),
        Value::Bool(is_true) => pickle.push(if *is_true { 0x88 } else { 0x89 }),
        Value::Number(number) => {
            // LONG1 of nine bytes: any u64 as a signed number.
            pickle.extend([0x8a, 9]);
            pickle.extend(number.as_u64().unwrap().to_le_bytes());
            pickle.push(0);
        }
        Value::String(text) => {
            pickle.push(b'X');
            pickle.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
            pickle.extend(text.as_bytes());
        }
        Value::Array(items) => {
            pickle.extend(b"](");
            for item in items {
                write(item, pickle);
            }
            pickle.push(b'e');
        }
        Value::Object(fields) => {
            pickle.extend(b"}(");
            for (key, item) in fields {
                write(&json!(key), pickle);
                write(item, pickle);
            }
            pickle.push(b'u');
        }
    }
}

const MIB: u64 = 1 << 20;
const BASE: u64 = 0x7f00_0000_0000;

/// A program on a device: every block is a segment of its own.
#[derive(Default)]
pub(crate) struct Program {
    live: Vec<(u64, u64, Value)>,
    events: Vec<Value>,
    next: u64,
}

/// Frames from `file:line function`, innermost first.
fn frames(stack: &[&str]) -> Value {
    stack
        .iter()
        .map(|text| {
            let (place, name) = text.split_once(' ').unwrap();
            let (filename, line) = place.rsplit_once(':').unwrap();
            let line: u64 = line.parse().unwrap();
            json!({ "filename": filename, "name": name, "line": line })
        })
        .collect()
}

impl Program {
    fn event(&mut self, action: &str, place: (&str, u64), size: u64, frames: &Value) {
        let time_us = 1000 + 250 * self.events.len() as u64;
        self.events.push(json!({
            "action": action, place.0: place.1, "size": size, "stream": 0, "time_us": time_us,
            "frames": frames,
        }));
    }

    /// Takes MiB, an even number from 10 on.
    pub(crate) fn take(&mut self, mib: u64, stack: &[&str]) -> u64 {
        let (address, size, frames) = (BASE + self.next, mib * MIB, frames(stack));
        self.next += size;
        self.event("segment_alloc", ("addr", address), size, &frames);
        self.event("alloc", ("addr", address), size, &frames);
        self.live.push((address, size, frames));
        address
    }

    /// Gives it back.
    pub(crate) fn give(&mut self, address: u64) {
        let index = self.live.iter().position(|it| it.0 == address).unwrap();
        let (_, size, _) = self.live.remove(index);
        for action in ["free_requested", "free_completed", "segment_free"] {
            self.event(action, ("addr", address), size, &json!([]));
        }
    }

    /// Is refused MiB.
    pub(crate) fn refuse(&mut self, mib: u64, device_free_mib: u64, stack: &[&str]) {
        let frames = frames(stack);
        self.event(
            "oom",
            ("device_free", device_free_mib * MIB),
            mib * MIB,
            &frames,
        );
    }

    /// Forgets all but the last events, as a ring buffer of so many does.
    pub(crate) fn forget_all_but(&mut self, count: usize) {
        self.events.drain(..self.events.len() - count);
    }

    /// Writes the snapshot of now.
    pub(crate) fn save(&self, folder: &Path, name: &str) -> PathBuf {
        let segments: Vec<Value> = self
            .live
            .iter()
            .map(|(address, size, frames)| {
                json!({
                    "device": 0, "address": address, "total_size": size, "stream": 0,
                    "segment_type": "large", "is_expandable": false, "frames": frames,
                    "blocks": [{
                        "address": address, "size": size, "requested_size": size,
                        "state": "active_allocated", "frames": frames,
                    }],
                })
            })
            .collect();
        let snapshot = json!({ "segments": segments, "device_traces": [self.events] });
        let path = folder.join(name);
        std::fs::write(&path, dumps(&snapshot)).unwrap();
        path
    }
}
