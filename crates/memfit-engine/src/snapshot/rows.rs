//! From the keys of a dict to a row.
//!
//! Responsible for what the keys of events, frames, blocks and segments mean, in all versions of torch
//! from 2.0 on (`_memory_snapshot_pickled` in `torch/csrc/cuda/memory_snapshot.cpp`,
//! `torch._C._cuda_memorySnapshot`). Not responsible for where the dicts come from.
//!
//! Unknown keys are passed over; a key that stands twice counts as the last, as in Python. What cannot be
//! used is said in a fault, and the row is kept as far as it can be.

use std::borrow::Cow;

use super::containers::{BlockRow, Containers, EventRow, MARK, SegmentRow};
use super::value::Value;
use super::words;
use super::{Action, Block, BlockState, PoolIndex, Segment, StackIndex};

/// The last value of each of `keys`.
fn look_up<const N: usize>(values: &[Value], keys: [u32; N]) -> [Option<Value>; N] {
    let mut found = [None; N];
    for pair in values.chunks_exact(2) {
        let Some(key) = pair[0].text() else { continue };
        if let Some(at) = keys.iter().position(|&wanted| wanted == key) {
            found[at] = Some(pair[1]);
        }
    }
    found
}

fn action_of(text: u32) -> Option<Action> {
    Some(match text {
        words::ALLOC => Action::Alloc,
        words::FREE_REQUESTED => Action::FreeRequested,
        words::FREE_COMPLETED => Action::FreeCompleted,
        words::SEGMENT_ALLOC => Action::SegmentAlloc,
        words::SEGMENT_FREE => Action::SegmentFree,
        words::SEGMENT_MAP => Action::SegmentMap,
        words::SEGMENT_UNMAP => Action::SegmentUnmap,
        words::SNAPSHOT => Action::Snapshot,
        words::OOM => Action::OutOfMemory,
        words::ANNOTATE => Action::Annotate,
        _ => return None,
    })
}

/// A dict with `action`.
pub(super) fn event(containers: &mut Containers, values: &[Value]) -> EventRow {
    let mut row = EventRow::default();
    let event = &mut row.event;
    let (mut action, mut address, mut device_free, mut size) = (Value::None, None, None, None);
    let (mut category, mut metadata, mut context) = (0, 0, 0);
    for pair in values.chunks_exact(2) {
        let value = pair[1];
        match pair[0].text() {
            Some(words::ACTION) => action = value,
            Some(words::ADDR) => address = Some(value),
            Some(words::DEVICE_FREE) => device_free = Some(value),
            Some(words::SIZE) => size = Some(value),
            // A handle is a pointer: all of its 64 bits count, whatever the sign.
            Some(words::STREAM) => match value {
                Value::Int(handle) => event.stream = handle.cast_unsigned(),
                Value::Unsigned(handle) => event.stream = handle,
                _ => row.fault = Some(wrong(containers, "stream", "a stream's handle", value)),
            },
            Some(words::TIME_US) => match value.unsigned() {
                Some(time_us) => event.time_us = time_us,
                None => row.fault = Some(wrong(containers, "time_us", "a time", value)),
            },
            Some(words::FRAMES) => event.stack = containers.stack_of(value),
            Some(words::POOL_ID) => match pool(containers, value) {
                Some(pool) => event.pool = pool,
                None => row.fault = Some(wrong(containers, "pool_id", "a pool's id", value)),
            },
            Some(words::CATEGORY) => category = value.text().unwrap_or_default(),
            Some(words::USER_METADATA) => metadata = value.text().unwrap_or_default(),
            Some(words::COMPILE_CONTEXT) => context = value.text().unwrap_or_default(),
            _ => (),
        }
    }
    let label = [category, metadata, context]
        .into_iter()
        .find(|&label| label != words::EMPTY && label != words::NOT_AVAILABLE);
    event.label = label
        .map(|label| containers.publish(label))
        .unwrap_or_default();
    let Some(known) = action.text().and_then(action_of) else {
        let fault = wrong(containers, "action", "a known action", action);
        return EventRow {
            event: MARK,
            fault: Some(fault),
        };
    };
    event.action = known;
    let (at, key) = match known {
        Action::OutOfMemory => (device_free.or(address), "device_free"),
        _ => (address, "addr"),
    };
    let needs_place = !matches!(known, Action::Snapshot | Action::Annotate);
    for (value, key, what, field) in [
        (at, key, "a whole number from 0 on", &mut event.address),
        (size, "size", "a count of bytes", &mut event.size),
    ] {
        match value.map(|value| (value.unsigned(), value)) {
            Some((Some(number), _)) => *field = number,
            Some((None, value)) if needs_place => {
                let fault = wrong(containers, key, what, value);
                return EventRow {
                    event: MARK,
                    fault: Some(fault),
                };
            }
            None if needs_place => {
                let fault = Some(format!("it has no `{key}`").into());
                return EventRow { event: MARK, fault };
            }
            _ => (),
        }
    }
    if event.action != Action::OutOfMemory && event.address.checked_add(event.size).is_none() {
        return EventRow::faulty("its address and size go beyond 64 bits");
    }
    row
}

/// Says what stands at a key instead of what should.
fn wrong(containers: &Containers, key: &str, wanted: &str, found: Value) -> Cow<'static, str> {
    format!("its `{key}` is {}, not {wanted}", shown(containers, found)).into()
}

fn shown(containers: &Containers, value: Value) -> String {
    match value {
        Value::Int(number) => number.to_string(),
        Value::Unsigned(number) => number.to_string(),
        Value::Float(number) => format!("{number:?}"),
        Value::Text(text) => {
            let start: String = containers.texts.get(text).chars().take(40).collect();
            format!("`{}`", start.escape_debug())
        }
        other => other.kind().to_owned(),
    }
}

fn pool(containers: &mut Containers, value: Value) -> Option<PoolIndex> {
    match value {
        Value::Pair(pair) => containers.pool_of(pair),
        _ => None,
    }
}

/// A dict with `filename`: file, function, line.
pub(super) fn frame(containers: &mut Containers, values: &[Value]) -> [u32; 3] {
    let [file, function, line] =
        look_up(values, [words::FILENAME, words::NAME, words::LINE]).map(Option::unwrap_or_default);
    let mut publish = |value: Value| containers.publish(value.text().unwrap_or_default()).0;
    let line = line.unsigned().and_then(|line| u32::try_from(line).ok());
    [publish(file), publish(function), line.unwrap_or_default()]
}

/// A dict with `state`.
pub(super) fn block(containers: &Containers, values: &[Value]) -> BlockRow {
    let [address, size, requested, state, frames, history] = look_up(
        values,
        [
            words::ADDRESS,
            words::SIZE,
            words::REQUESTED_SIZE,
            words::STATE,
            words::FRAMES,
            words::HISTORY,
        ],
    );
    let mut row = BlockRow::default();
    row.state = match state.and_then(Value::text) {
        Some(words::ACTIVE_ALLOCATED) => Some(BlockState::Allocated),
        Some(words::ACTIVE_AWAITING_FREE | words::ACTIVE_PENDING_FREE) => {
            Some(BlockState::AwaitingFree)
        }
        Some(words::INACTIVE) => Some(BlockState::Inactive),
        _ => {
            let state = shown(containers, state.unwrap_or_default());
            row.fault = Some(format!("its `state` is {state}"));
            None
        }
    };
    let mut number = |key: &str, value: Option<Value>| {
        let number = value.and_then(Value::unsigned);
        if let (Some(value), None) = (value, number) {
            row.fault = Some(format!("its `{key}` is {}", shown(containers, value)));
            row.state = None;
        }
        number
    };
    row.address = number("address", address);
    let size = number("size", size);
    let requested = number("requested_size", requested);
    if size.is_none() && row.fault.is_none() {
        row.fault = Some("it has no `size`".to_owned());
        row.state = None;
    }
    row.size = size.unwrap_or_default();
    row.stack = containers.stack_of(frames.unwrap_or_default());
    // torch 2.0: who asked, and for how much, is in the first entry of `history`.
    let past = history
        .and_then(Value::container)
        .and_then(|list| containers.body(list).first());
    let past = past.and_then(|entry| entry.container());
    let past = past.map_or(&[][..], |entry| containers.body(entry));
    let past = &past[..past.len().min(32)];
    let [real_size, past_frames] = look_up(past, [words::REAL_SIZE, words::FRAMES]);
    if row.stack == StackIndex::NONE {
        row.stack = containers.stack_of(past_frames.unwrap_or_default());
    }
    row.requested_size = requested
        .or_else(|| real_size.and_then(Value::unsigned))
        .unwrap_or(row.size);
    row
}

/// A dict with `total_size`.
pub(super) fn segment(containers: &mut Containers, values: &[Value]) -> SegmentRow {
    let [device, address, total_size, stream, kind, expandable] = look_up(
        values,
        [
            words::DEVICE,
            words::ADDRESS,
            words::TOTAL_SIZE,
            words::STREAM,
            words::SEGMENT_TYPE,
            words::IS_EXPANDABLE,
        ],
    );
    let [pool_id, frames, blocks] = look_up(
        values,
        [words::SEGMENT_POOL_ID, words::FRAMES, words::BLOCKS],
    );
    let mut faults = Vec::new();
    let mut number = |key: &str, value: Option<Value>| {
        let number = value.and_then(Value::unsigned);
        if let (Some(value), None) = (value, number) {
            faults.push(format!("its `{key}` is {}", shown(containers, value)));
        }
        number
    };
    let device = number("device", device).unwrap_or_default();
    let place = number("address", address).zip(number("total_size", total_size));
    let stream = match stream {
        Some(Value::Int(handle)) => handle.cast_unsigned(),
        other => number("stream", other).unwrap_or_default(),
    };
    let device = u32::try_from(device).unwrap_or_else(|_| {
        faults.push(format!("its `device` is {device}"));
        0
    });
    let Some((address, total_size)) =
        place.filter(|(start, size)| start.checked_add(*size).is_some())
    else {
        faults.push("a segment has no place: `address` and `total_size` are needed".to_owned());
        return SegmentRow {
            device,
            segment: None,
            faults,
        };
    };
    let pool = match pool_id {
        None => PoolIndex::DEFAULT,
        Some(id) => pool(containers, id).unwrap_or_else(|| {
            faults.push(format!(
                "its `segment_pool_id` is {}",
                shown(containers, id)
            ));
            PoolIndex::DEFAULT
        }),
    };
    let mut segment = Segment {
        address,
        total_size,
        stream,
        is_small: kind.and_then(Value::text) == Some(words::SMALL),
        is_expandable: expandable == Some(Value::Bool(true)),
        pool,
        stack: containers.stack_of(frames.unwrap_or_default()),
        blocks: Vec::new(),
    };
    lay_blocks(
        containers,
        &mut segment,
        blocks.unwrap_or_default(),
        &mut faults,
    );
    for fault in &mut faults {
        fault.insert_str(0, &format!("segment at {address:#x}: "));
    }
    SegmentRow {
        device,
        segment: Some(segment),
        faults,
    }
}

/// Puts the blocks in address order; leaves out what has no place in the segment.
fn lay_blocks(
    containers: &mut Containers,
    segment: &mut Segment,
    list: Value,
    faults: &mut Vec<String>,
) {
    let Some(list) = list.container() else {
        return;
    };
    let values = containers.take_body(list);
    let mut next = segment.address;
    let mut fault = |what: String| {
        if faults.len() < super::MOST_PROBLEMS {
            faults.push(what);
        }
    };
    for (number, &value) in values.iter().enumerate() {
        let Some(row) = containers.take_block(value) else {
            fault(format!("block {number} is no dict with a `state`"));
            continue;
        };
        if let Some(what) = row.fault {
            fault(format!("block {number}: {what}"));
        }
        let Some(state) = row.state else { continue };
        let address = row.address.unwrap_or(next);
        next = address.saturating_add(row.size);
        segment.blocks.push(Block {
            address,
            size: row.size,
            requested_size: row.requested_size,
            state,
            stack: row.stack,
        });
    }
    segment.blocks.sort_by_key(|block| block.address);
    let (start, end) = (segment.address, segment.address + segment.total_size);
    let mut free_from = start;
    segment.blocks.retain(|block| {
        let block_end = block.address.saturating_add(block.size);
        let fits = block.address >= free_from && block_end <= end;
        if fits {
            free_from = block_end;
        } else {
            let what = if block_end > end || block.address < start {
                "lies outside the segment"
            } else {
                "overlaps the block before it"
            };
            fault(format!(
                "the block at {:#x} {what} and is left out",
                block.address
            ));
        }
        fits
    });
}
