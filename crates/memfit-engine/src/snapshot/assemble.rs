//! The whole snapshot from what the pickle holds.
//!
//! Responsible for the keys of the outermost dict, and for which trace and segment belong to which device.
//! Not responsible for single rows (`rows.rs`), nor for whether the events agree with each other
//! (`check.rs`).

use std::collections::BTreeMap;

use super::check::check;
use super::containers::{Containers, Slot};
use super::error::SnapshotError;
use super::problems::Problems;
use super::value::Value;
use super::words;
use super::{Annotation, DeviceRecord, Snapshot};

/// Makes a snapshot of a pickle's value.
pub(super) fn assemble(
    mut containers: Containers,
    value: Value,
) -> Result<Snapshot, SnapshotError> {
    let not_a_snapshot = |what: String| SnapshotError::NotASnapshot { what };
    let container = value
        .container()
        .ok_or_else(|| not_a_snapshot(value.kind().to_owned()))?;
    let mut assembly = Assembly::default();
    match containers.slot(container) {
        Slot::Dict(_) | Slot::PlainDict(_) => {
            let body = containers.take_body(container);
            let last = |wanted| {
                let mut pairs = body.chunks_exact(2).rev();
                pairs
                    .find(|pair| pair[0].text() == Some(wanted))
                    .map(|pair| pair[1])
            };
            let (segments, traces) = (last(words::SEGMENTS), last(words::DEVICE_TRACES));
            if segments.is_none() && traces.is_none() {
                return Err(not_a_snapshot(dict_with_keys(&containers, &body)));
            }
            assembly.traces(&mut containers, traces);
            assembly.segments(&mut containers, segments);
            assembly.settings(&mut containers, last(words::ALLOCATOR_SETTINGS));
            assembly.annotations(&mut containers, last(words::EXTERNAL_ANNOTATIONS));
        }
        // `torch.cuda.memory_snapshot()` returns the segments alone.
        Slot::List(_) => {
            let items = containers.body(container);
            let is_segment = |item: &Value| {
                item.container()
                    .is_some_and(|c| matches!(containers.slot(c), Slot::Segment(_)))
            };
            if !items.first().is_some_and(is_segment) {
                return Err(not_a_snapshot(format!("a list of {} things", items.len())));
            }
            assembly.segments(&mut containers, Some(value));
        }
        other => return Err(not_a_snapshot(part_of_one(other).to_owned())),
    }
    Ok(assembly.finish(&mut containers))
}

fn dict_with_keys(containers: &Containers, body: &[Value]) -> String {
    let keys = body.iter().step_by(2).take(5).map(|key| match *key {
        Value::Text(text) => {
            let start: String = containers.texts.get(text).chars().take(40).collect();
            format!("`{}`", start.escape_debug())
        }
        other => other.kind().to_owned(),
    });
    let keys: Vec<String> = keys.collect();
    match keys[..] {
        [] => "an empty dict".to_owned(),
        _ => format!("a dict with {}", keys.join(", ")),
    }
}

const fn part_of_one(slot: Slot) -> &'static str {
    match slot {
        Slot::Trace(_) => "a list of events",
        Slot::Event(_) => "one event",
        Slot::Segment(_) => "one segment",
        Slot::Block(_) => "one block",
        Slot::Frame(_) | Slot::Stack(_) => "a stack of frames",
        _ => "something else",
    }
}

#[derive(Default)]
struct Assembly {
    devices: BTreeMap<u32, DeviceRecord>,
    settings: Vec<(String, String)>,
    annotations: Vec<Annotation>,
    problems: Problems,
}

impl Assembly {
    /// `device_traces`: a list of events for each device.
    fn traces(&mut self, containers: &mut Containers, value: Option<Value>) {
        let Some(value) = value else { return };
        let Some(list) = as_list(containers, value) else {
            self.problems.of_whole(format!(
                "`device_traces` is {}, not a list",
                kind(containers, value)
            ));
            return;
        };
        for (index, value) in (0..).zip(containers.take_body(list)) {
            let container = value.container().unwrap_or_default();
            let trace = match value
                .container()
                .map(|container| containers.slot(container))
            {
                Some(Slot::Trace(trace)) => Some(trace),
                // Empty, or its first entry was no event.
                Some(Slot::List(_)) => containers.new_trace().inspect(|&trace| {
                    for item in containers.take_body(container) {
                        containers.push_event(trace, item);
                    }
                }),
                _ => None,
            };
            let Some(trace) = trace else {
                let what = format!("its trace is {}, not a list", kind(containers, value));
                self.problems.of_device(index, what);
                continue;
            };
            let trace = containers.take_trace(trace);
            self.problems
                .of_events(index, trace.faults, trace.fault_count);
            if !trace.events.is_empty() {
                self.device(index).events = trace.events;
            }
        }
    }

    fn segments(&mut self, containers: &mut Containers, value: Option<Value>) {
        let Some(value) = value else { return };
        let Some(list) = as_list(containers, value) else {
            self.problems.of_whole(format!(
                "`segments` is {}, not a list",
                kind(containers, value)
            ));
            return;
        };
        for (number, item) in containers.take_body(list).into_iter().enumerate() {
            let row = item
                .container()
                .and_then(|container| containers.take_segment(container));
            let Some(row) = row else {
                self.problems
                    .of_whole(format!("segment {number} is no dict with a `total_size`"));
                continue;
            };
            for fault in row.faults {
                self.problems.of_device(row.device, fault);
            }
            if let Some(segment) = row.segment {
                self.device(row.device).segments.push(segment);
            }
        }
        for record in self.devices.values_mut() {
            record.segments.sort_by_key(|segment| segment.address);
            let (mut end, index, problems) = (0, record.index, &mut self.problems);
            record.segments.retain(|segment| {
                let overlaps = segment.address < end;
                if overlaps {
                    let what = "overlaps the segment before it and is left out";
                    problems.of_device(index, format!("segment at {:#x}: {what}", segment.address));
                } else {
                    end = segment.address + segment.total_size;
                }
                !overlaps
            });
        }
    }

    fn settings(&mut self, containers: &mut Containers, value: Option<Value>) {
        let Some(dict) = value.and_then(Value::container) else {
            return;
        };
        for pair in containers.take_body(dict).chunks_exact(2) {
            let Some(key) = pair[0].text() else { continue };
            let text = setting(containers, pair[1]);
            self.settings
                .push((containers.texts.get(key).to_owned(), text));
        }
    }

    fn annotations(&mut self, containers: &mut Containers, value: Option<Value>) {
        let Some(list) = value.and_then(Value::container) else {
            return;
        };
        for (number, item) in containers.take_body(list).into_iter().enumerate() {
            let body = item
                .container()
                .map(|container| containers.take_body(container));
            if let Some(annotation) = annotation(containers, &body.unwrap_or_default()) {
                self.annotations.push(annotation);
            } else {
                let what = format!("annotation {number} has no stage, name, device and time");
                self.problems.of_whole(what);
            }
        }
    }

    fn device(&mut self, index: u32) -> &mut DeviceRecord {
        let record = self.devices.entry(index).or_default();
        record.index = index;
        record
    }

    fn finish(mut self, containers: &mut Containers) -> Snapshot {
        for record in self.devices.values() {
            check(record, &mut self.problems);
        }
        let (texts, stacks, pools) = containers.tables();
        Snapshot {
            texts,
            stacks,
            pools,
            devices: self.devices.into_values().collect(),
            settings: self.settings,
            annotations: self.annotations,
            problems: self.problems.finish(),
        }
    }
}

fn annotation(containers: &mut Containers, body: &[Value]) -> Option<Annotation> {
    let last = |wanted| {
        let mut pairs = body.chunks_exact(2).rev();
        pairs
            .find(|pair| pair[0].text() == Some(wanted))
            .map(|pair| pair[1])
    };
    Some(Annotation {
        is_start: match last(words::STAGE)?.text()? {
            words::START => true,
            words::END => false,
            _ => return None,
        },
        name: containers.publish(last(words::NAME)?.text()?),
        device: u32::try_from(last(words::DEVICE)?.unsigned()?).ok()?,
        time_us: last(words::TIME_US)?.unsigned()?,
    })
}

fn as_list(containers: &Containers, value: Value) -> Option<u32> {
    value
        .container()
        .filter(|&container| matches!(containers.slot(container), Slot::List(_)))
}

fn kind(containers: &Containers, value: Value) -> &'static str {
    match value
        .container()
        .map(|container| containers.slot(container))
    {
        None => value.kind(),
        Some(Slot::Dict(_) | Slot::PlainDict(_)) => "a dict",
        Some(Slot::List(_)) => "a list",
        Some(Slot::Used) => "the same object as an earlier one",
        Some(other) => part_of_one(other),
    }
}

/// A setting's value as text: numbers and words as Python prints them, a dict as the `[key:value,...]` of
/// `PYTORCH_CUDA_ALLOC_CONF`.
fn setting(containers: &mut Containers, value: Value) -> String {
    let plain = |value: Value| match value {
        Value::None => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Unsigned(number) => number.to_string(),
        Value::Float(number) => format!("{number:?}"),
        Value::Text(text) => containers.texts.get(text).to_owned(),
        other => other.kind().to_owned(),
    };
    let Some(container) = value.container() else {
        return plain(value);
    };
    let body = containers.body(container);
    let pairs = body.chunks_exact(2).take(1024);
    let pairs: Vec<String> = pairs
        .map(|pair| format!("{}:{}", plain(pair[0]), plain(pair[1])))
        .collect();
    // Taken, so that a dict that stands under many keys is written once.
    drop(containers.take_body(container));
    format!("[{}]", pairs.join(","))
}
