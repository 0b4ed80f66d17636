//! Containers of a pickle taken in by others.
//!
//! Responsible for turning each list and dict into a row as soon as another container takes it in: an event goes into
//! the columns of its trace and is gone. Not responsible for holding them (`containers.rs`), for what the keys of a row
//! mean (`rows.rs`), nor for the whole (`assemble.rs`).
//!
//! Rows are known by their keys, not by where they stand, so the order of keys and of parts is free.
//!
//! Invariants: each container is turned once, so that sharing cannot multiply work; a turned container does
//! not change any more.

use super::containers::{Containers, NO_BODY, Refusal, Slot, Trace, pushed};
use super::rows;
use super::value::Value;
use super::words;

/// Appends to a list.
pub(super) fn append(
    containers: &mut Containers,
    list: Value,
    items: &[Value],
) -> Result<(), Refusal> {
    let list = list.container().ok_or(Refusal::NotAList)?;
    for &item in items {
        finish(containers, item)?;
    }
    match containers.slot(list) {
        Slot::Trace(trace) => {
            for &item in items {
                containers.push_event(trace, item);
            }
        }
        Slot::List(NO_BODY) if items.first().is_some_and(|&item| containers.is_event(item)) => {
            let trace = pushed(&mut containers.traces, Trace::default())?;
            containers.slots[list as usize] = Slot::Trace(trace);
            for &item in items {
                containers.push_event(trace, item);
            }
        }
        Slot::List(body) => {
            let body = containers.extend(body, items)?;
            containers.slots[list as usize] = Slot::List(body);
        }
        Slot::Dict(_) | Slot::PlainDict(_) => return Err(Refusal::NotAList),
        _ => return Err(Refusal::Changed),
    }
    Ok(())
}

/// Sets keys, which stand before their values, in a dict.
pub(super) fn set(
    containers: &mut Containers,
    dict: Value,
    items: &[Value],
) -> Result<(), Refusal> {
    let dict = dict.container().ok_or(Refusal::NotADict)?;
    for value in items.iter().skip(1).step_by(2) {
        finish(containers, *value)?;
    }
    match containers.slot(dict) {
        Slot::Dict(body) => {
            let body = containers.extend(body, items)?;
            containers.slots[dict as usize] = Slot::Dict(body);
        }
        Slot::PlainDict(body) => {
            let body = containers.extend(body, items)?;
            containers.slots[dict as usize] = Slot::PlainDict(body);
        }
        Slot::List(_) | Slot::Trace(_) => return Err(Refusal::NotADict),
        _ => return Err(Refusal::Changed),
    }
    Ok(())
}

/// Turns a container that is about to be taken in.
#[inline]
fn finish(containers: &mut Containers, value: Value) -> Result<(), Refusal> {
    // Most are frames, turned long ago.
    match value
        .container()
        .map(|container| (container, containers.slot(container)))
    {
        Some((container, Slot::List(_))) => finish_list(containers, container),
        Some((container, Slot::Dict(_))) => finish_dict(containers, container),
        _ => Ok(()),
    }
}

fn finish_list(containers: &mut Containers, list: u32) -> Result<(), Refusal> {
    match containers.body(list).first() {
        Some(&first) if containers.is_frame(first) => containers.finish_stack(list),
        _ => Ok(()),
    }
}

fn finish_dict(containers: &mut Containers, dict: u32) -> Result<(), Refusal> {
    let kind = containers
        .body(dict)
        .iter()
        .step_by(2)
        .find_map(|key| match key.text() {
            Some(words::ACTION) => Some(Row::Event),
            Some(words::TOTAL_SIZE) => Some(Row::Segment),
            Some(words::STATE) => Some(Row::Block),
            Some(words::FILENAME) => Some(Row::Frame),
            _ => None,
        });
    let Some(kind) = kind else {
        if let Slot::Dict(body) = containers.slot(dict) {
            containers.slots[dict as usize] = Slot::PlainDict(body);
        }
        return Ok(());
    };
    let values = containers.take_body(dict);
    let slot = match kind {
        Row::Event => {
            let row = rows::event(containers, &values);
            match containers.free_events.pop() {
                Some(free) => {
                    containers.waiting_events[free as usize] = row;
                    Slot::Event(free)
                }
                None => Slot::Event(pushed(&mut containers.waiting_events, row)?),
            }
        }
        Row::Frame => {
            let words = rows::frame(containers, &values);
            Slot::Frame(containers.frames.number_of(&words).ok_or(Refusal::Full)?)
        }
        Row::Block => {
            let row = rows::block(containers, &values);
            Slot::Block(pushed(&mut containers.blocks, row)?)
        }
        Row::Segment => {
            let row = rows::segment(containers, &values);
            Slot::Segment(pushed(&mut containers.segments, Some(row))?)
        }
    };
    containers.slots[dict as usize] = slot;
    containers.give_back(values);
    Ok(())
}

enum Row {
    Event,
    Segment,
    Block,
    Frame,
}
