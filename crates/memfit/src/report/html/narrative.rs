//! An explanation as the page tells it.
//!
//! Responsible for the headline, the sentences under it and the findings that the page lists, cut to what a page can
//! hold. Not responsible for how findings look (`page/findings.js`) nor for the numbers.

use std::collections::BTreeMap;

use memfit_engine::bytes::Bytes;
use memfit_engine::explain::{Category, DeviceExplanation, Explanation};
use serde_json::{Value, json};

use crate::report::words::{NO_HISTORY, counted, share};

/// Entries of one list.
const ENTRIES: usize = 100;
/// Characters of one text.
const CHARACTERS: usize = 4_000;

/// What stands on top of the page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Story {
    /// The peak, what the device was asked for in vain, and who owned most.
    pub(super) headline: String,
    /// One for each finding.
    pub(super) sentences: Vec<String>,
}

/// The story of the device that held most.
pub(super) fn story(explanation: &Explanation) -> Story {
    let held = |device: &&DeviceExplanation| (device.peak.allocated_bytes, u32::MAX - device.index);
    let Some(device) = explanation.devices.iter().max_by_key(held) else {
        return Story {
            headline: "Nothing is recorded in this snapshot".to_owned(),
            sentences: Vec::new(),
        };
    };
    Story {
        headline: headline(device),
        sentences: sentences(device),
    }
}

fn headline(device: &DeviceExplanation) -> String {
    let peak = device.peak.allocated_bytes;
    let what = if device.has_history {
        "Peak "
    } else {
        "At the end "
    };
    let mut text = format!(
        "{what}{peak} allocated, {} reserved",
        device.peak.reserved_bytes
    );
    let mut by_category: BTreeMap<&str, Bytes> = BTreeMap::new();
    for owner in &device.owners {
        *by_category.entry(owner.category.name()).or_default() += owner.bytes;
    }
    // The first of the largest, so that ties are told alike every time.
    let largest = by_category
        .iter()
        .rev()
        .max_by_key(|(_, bytes)| **bytes)
        .filter(|(category, bytes)| {
            **bytes > Bytes::ZERO && **category != Category::Unknown.name()
        });
    if let Some((category, bytes)) = largest {
        let category = category.replace('_', " ");
        text = format!(
            "{text}; {} of {} is {category}",
            share(*bytes, peak),
            if device.has_history { "the peak" } else { "it" }
        );
    }
    if let Some(first) = device.oom.first() {
        text = format!(
            "Out of memory: {} refused{}. {text}",
            first.requested_bytes,
            match device.oom.len() {
                1 => String::new(),
                count => format!(", and {} more", counted(count as u64 - 1, "request")),
            }
        );
    }
    text
}

fn sentences(device: &DeviceExplanation) -> Vec<String> {
    let mut sentences: Vec<String> = Vec::new();
    sentences.extend(device.oom.first().map(|oom| oom.summary.clone()));
    sentences.push(if device.has_history {
        device.fragmentation.summary.clone()
    } else {
        NO_HISTORY.to_owned()
    });
    sentences.push(device.end.summary.clone());
    sentences.extend(device.growth_summary.clone());
    sentences.extend(device.counterfactuals.first().map(|best| {
        format!(
            "Replayed with `{}`, the peak of reserved bytes is {}.",
            best.settings, best.peak_reserved_bytes
        )
    }));
    sentences.retain(|sentence| !sentence.is_empty());
    sentences.iter().map(|sentence| whole(sentence)).collect()
}

/// A clause as a sentence of its own.
fn whole(clause: &str) -> String {
    let mut characters = clause.chars();
    let first: String = characters
        .next()
        .into_iter()
        .flat_map(char::to_uppercase)
        .collect();
    let stop = if clause.ends_with(['.', '!', '?']) {
        ""
    } else {
        "."
    };
    format!("{first}{}{stop}", characters.as_str())
}

/// What the page lists, as JSON with the names of the contract. Owners are left out: the page has its own.
pub(super) fn findings(explanation: &Explanation) -> Vec<u8> {
    let devices: Vec<Value> = explanation.devices.iter().map(device_findings).collect();
    let mut document = json!({
        "schema_version": explanation.schema_version,
        "devices": devices,
        "problems": first(&explanation.problems),
    });
    cut(&mut document);
    serde_json::to_vec(&document).unwrap_or_default()
}

fn device_findings(device: &DeviceExplanation) -> Value {
    json!({
        "index": device.index,
        "peak": device.peak,
        "fragmentation": device.fragmentation,
        "oom": first(&device.oom),
        "growth": first(&device.growth),
        "growth_summary": device.growth_summary,
        "counterfactuals": first(&device.counterfactuals),
    })
}

fn first<T>(all: &[T]) -> &[T] {
    &all[..all.len().min(ENTRIES)]
}

/// Cuts lists and texts, whatever holds them.
fn cut(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Some((end, _)) = text.char_indices().nth(CHARACTERS) {
                text.truncate(end);
                text.push('…');
            }
        }
        Value::Array(all) => {
            all.truncate(ENTRIES);
            all.iter_mut().for_each(cut);
        }
        Value::Object(fields) => fields.values_mut().for_each(cut),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
