//! What grows from step to step: the leak and the stack that keeps it.
//!
//! Responsible for finding stacks whose bytes rise at every step, and for recognising the kinds of leak that
//! people make. Not responsible for finding steps (`steps.rs`).
//!
//! The rule: at every boundary between steps the bytes that a stack's allocations hold are added up. The
//! first boundary is warm-up (optimizer state is made in the first step) where five or more are known. A stack
//! grows when its bytes rise at *every* remaining boundary, at least three times, and are still held when
//! the snapshot is taken. What rises and falls back is no leak, however much it is.
//!
//! Some things are filled, as they should be, and do not count: the optimizer's states and parameters' gradients,
//! which come late where a layer is used late, and what one larger block replaces each time. The latter may be a
//! cache, a table for the longest input so far, or batches that happened to rise: it counts where it is outside
//! modules and has risen [`MIN_REPLACED_RISES`] times.
//!
//! A rhythm alone (`steps.rs`) may be that of tokens or of layers that are set up. There parameters, KV caches and
//! private pools do not count either, nor does anything that is replaced. Nor does anything at all where private pools are
//! filled, as graphs are captured then, or where all that is held does not rise, as layers are replaced then.
//!
//! Between two snapshots the same sums are compared at their ends.

use std::collections::BTreeMap;

use super::history::History;
use super::life::{Allocation, NEVER};
use super::owners::{Category, Judge};
use super::sites::{Phase, Sites};
use super::steps::{MIN_BOUNDARIES, StepSource, Steps};
use crate::bytes::Bytes;
use crate::snapshot::{Action, BlockState, DeviceRecord, PoolIndex, Snapshot, StackIndex};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Boundaries looked at; of more, evenly spaced ones.
const MAX_BOUNDARIES: usize = 64;

/// Parts of a recording in each of which something must have been added that is not at every step.
const PARTS: usize = 4;
/// Growing stacks told, the fastest first.
const MAX_GROWTH: usize = 100;
/// Requests of at most so many bytes are single numbers.
const SCALAR_BYTES: u64 = 8;
/// Requests of at most so many bytes may be a loss: they get the smallest block.
const SMALL_BYTES: u64 = 512;
/// Rises of what is replaced by something larger each time. Sizes that are random rise so often once in 10!.
const MIN_REPLACED_RISES: usize = 9;
/// So many stacks of forward that grow together are a graph that is kept, not a list of results. With
/// something small that is kept beside them, one is enough.
const GRAPH_STACKS: usize = 3;

/// A kind of leak that people make.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Activations of every step stay: something holds the autograd graph, such as `total_loss += loss`.
    KeptGraph,
    /// A number a step stays: a loss that is stored, or added up, as a tensor.
    KeptScalar,
    /// Anything else that stays.
    Kept,
}

/// A stack whose bytes rise at every step.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Growth {
    /// Frames, one a line, innermost first.
    pub stack: String,
    /// Rise from one step to the next, on average.
    pub bytes_per_step: Bytes,
    /// Rise over all steps looked at.
    pub bytes: Bytes,
    /// Steps looked at; absent between two snapshots where their number is not known.
    pub steps: Option<u64>,
    /// What for.
    pub category: Category,
    /// Which kind of leak it looks like.
    pub pattern: Pattern,
}

/// The growing stacks of a device, and what they come down to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) growth: Vec<Growth>,
    pub(super) summary: Option<String>,
}

/// Bytes of one stack's allocations at each boundary.
struct Series {
    category: Category,
    stack: StackIndex,
    bytes: Vec<u64>,
    /// Their number.
    counts: Vec<u64>,
    /// When the snapshot was taken.
    last: u64,
    largest_request: u64,
    is_private: bool,
}

/// What is said where growth cannot be looked for.
pub(super) fn no_steps() -> Found {
    Found {
        growth: Vec::new(),
        summary: Some(
            "no steps found: leaks not looked for; give two snapshots \
             (`memfit explain before.pickle after.pickle`)"
                .to_owned(),
        ),
    }
}

/// Finds what grows within one recording.
pub(super) fn within(
    device: &DeviceRecord,
    history: &History,
    steps: &Steps,
    judge: &Judge<'_>,
) -> Found {
    let (boundaries, stride) = sample(&steps.boundaries);
    let by_text = series(history, &boundaries, judge);
    let is_setup = steps.source == StepSource::Rhythm && is_setup(&by_text);
    let looked_at = (boundaries.len() - 1) * stride;
    let mut rising: Vec<(String, Series)> = by_text
        .into_iter()
        .filter(|(_, series)| series.grows(&series.bytes, steps.source) && series.is_kept())
        .collect();
    let all: Bytes = rising.iter().map(|(_, it)| Bytes(it.rise())).sum();
    rising.retain(|(_, it)| !is_setup && !it.is_filled(steps.source, judge.sites));
    if rising.is_empty() && all > Bytes::ZERO {
        return Found {
            growth: Vec::new(),
            summary: Some(format!(
                "{all} more are held after {looked_at} steps, which may be parameters and caches that \
                 are filled; whether they ever stop, two snapshots tell"
            )),
        };
    }
    let graph = rising
        .iter()
        .filter(|(_, it)| it.category == Category::Activation && !it.is_small())
        .count();
    let small = rising.iter().any(|(_, it)| it.is_small());
    let keeps_graph = graph >= GRAPH_STACKS || (graph > 0 && small);
    rising.sort_by_key(|(_, series)| std::cmp::Reverse(series.rise()));
    let growth: Vec<Growth> = rising
        .iter()
        .map(|(stack, it)| Growth {
            stack: stack.clone(),
            bytes_per_step: Bytes(it.rise() / (looked_at as u64).max(1)),
            bytes: Bytes(it.rise()),
            steps: Some(looked_at as u64),
            category: it.category,
            pattern: it.pattern(keeps_graph),
        })
        .collect();
    let every = if rising.iter().all(|(_, it)| rises(&it.bytes)) {
        "after every step"
    } else {
        "after a step, on average"
    };
    let mut found = Found {
        summary: summary(
            &growth,
            every,
            culprit(device, &rising, judge.sites, steps, keeps_graph),
        ),
        growth,
    };
    found.growth.truncate(MAX_GROWTH);
    found
}

/// Boundaries to look at, evenly spaced and without the warm-up, and the steps between two of them.
fn sample(boundaries: &[u32]) -> (Vec<u32>, usize) {
    let warm = if boundaries.len() > MIN_BOUNDARIES {
        &boundaries[1..]
    } else {
        boundaries
    };
    let stride = warm.len().div_ceil(MAX_BOUNDARIES).max(1);
    (warm.iter().copied().step_by(stride).collect(), stride)
}

/// Whether graphs are captured or layers replaced, rather than steps made.
fn is_setup(by_text: &[(String, Series)]) -> bool {
    let captures = by_text
        .iter()
        .any(|(_, it)| it.is_private && rises(&it.bytes));
    let mut all: Vec<u64> = Vec::new();
    for (_, series) in by_text {
        all.resize(series.bytes.len(), 0);
        for (sum, bytes) in all.iter_mut().zip(&series.bytes) {
            *sum = sum.saturating_add(*bytes);
        }
    }
    captures || all.first() >= all.last()
}

fn rises(bytes: &[u64]) -> bool {
    bytes.len() >= MIN_BOUNDARIES && bytes.windows(2).all(|pair| pair[0] < pair[1])
}

/// Whether something is added every few steps, all through the recording.
fn rises_in_parts(values: &[u64]) -> bool {
    let steps = values.len().saturating_sub(1);
    let at = |part: usize| values.get(part * steps / PARTS).copied();
    steps >= 2 * PARTS
        && values.windows(2).all(|pair| pair[0] <= pair[1])
        && (0..PARTS).all(|part| at(part) < at(part + 1))
}

/// The bytes of every stack that holds any at a boundary, by its text.
fn series(history: &History, boundaries: &[u32], judge: &Judge<'_>) -> Vec<(String, Series)> {
    let index = |state: u32| boundaries.partition_point(|&boundary| boundary < state);
    // What has no stack is told apart by what it is for.
    let mut by_stack: BTreeMap<(StackIndex, Option<Category>), Vec<&Allocation>> = BTreeMap::new();
    for allocation in &history.allocations {
        if index(allocation.start) < index(allocation.let_go) {
            let stack = allocation.stack;
            let purpose = (stack == StackIndex::NONE).then(|| judge.category(allocation).0);
            by_stack
                .entry((stack, purpose))
                .or_default()
                .push(allocation);
        }
    }
    let mut by_text: BTreeMap<(String, Option<Category>), Series> = BTreeMap::new();
    for ((stack, purpose), held) in by_stack {
        // The last one made stands for the others: the first may be from before recording.
        let Some(last) = held.iter().max_by_key(|it| (it.start, it.address)) else {
            continue;
        };
        let series = by_text
            .entry((judge.stack_text(last), purpose))
            .or_insert_with(|| Series {
                category: judge.category(last).0,
                stack,
                bytes: vec![0; boundaries.len()],
                counts: vec![0; boundaries.len()],
                last: 0,
                largest_request: 0,
                is_private: false,
            });
        for allocation in held {
            if allocation.let_go == NEVER {
                series.last = series.last.saturating_add(allocation.size);
            }
            series.largest_request = series.largest_request.max(allocation.requested_size);
            series.is_private |= allocation.pool != PoolIndex::DEFAULT;
            let held = index(allocation.start)..index(allocation.let_go);
            for bytes in &mut series.bytes[held.clone()] {
                *bytes = bytes.saturating_add(allocation.size);
            }
            for count in &mut series.counts[held] {
                *count += 1;
            }
        }
    }
    by_text
        .into_iter()
        .map(|((text, _), series)| (text, series))
        .collect()
}

impl Series {
    fn rise(&self) -> u64 {
        match (self.bytes.first(), self.bytes.last()) {
            (Some(first), Some(last)) => last.saturating_sub(*first),
            _ => 0,
        }
    }

    /// Whether there is more and more of it: after every step, or, where the steps are certain and no model
    /// or cache is filled, every few steps.
    fn grows(&self, values: &[u64], source: StepSource) -> bool {
        rises(values)
            || (source != StepSource::Rhythm && !self.is_setup() && rises_in_parts(values))
    }

    const fn is_setup(&self) -> bool {
        matches!(
            self.category,
            Category::Parameter | Category::KvCache | Category::Checkpoint
        )
    }

    /// Whether no more than a step's worth of what grew is gone at the end.
    fn is_kept(&self) -> bool {
        let mut last = self.bytes.iter().rev();
        match (last.next(), last.next()) {
            (Some(_), Some(before)) => self.last >= *before,
            _ => false,
        }
    }

    /// Whether it is what a program fills once: parameters, a cache, the pool of a graph.
    fn is_filled(&self, source: StepSource, sites: &Sites<'_>) -> bool {
        let site = sites.get(self.stack);
        // As many blocks, each larger than the one before.
        let is_replaced = !self.grows(&self.counts, source);
        let may_be_chance = site.is_in_forward() || self.bytes.len() <= MIN_REPLACED_RISES;
        self.category == Category::OptimizerState
            || site.accumulates_gradient()
            || (is_replaced && may_be_chance)
            || (source == StepSource::Rhythm && (self.is_setup() || self.is_private || is_replaced))
    }

    const fn is_small(&self) -> bool {
        self.largest_request <= SMALL_BYTES
    }

    fn pattern(&self, keeps_graph: bool) -> Pattern {
        if self.largest_request <= SCALAR_BYTES {
            Pattern::KeptScalar
        } else if keeps_graph && self.category == Category::Activation {
            Pattern::KeptGraph
        } else {
            Pattern::Kept
        }
    }
}

/// The user's line that seems to hold what grows: that of a scalar that stays, or, where it is a graph, of a scalar that
/// is added once a step outside modules and backward.
fn culprit(
    device: &DeviceRecord,
    rising: &[(String, Series)],
    sites: &Sites<'_>,
    steps: &Steps,
    keeps_graph: bool,
) -> Option<String> {
    let outside = |stack: StackIndex| {
        let site = sites.get(stack);
        site.phase() == Phase::Forward && !site.is_in_forward()
    };
    let kept = rising
        .iter()
        .find(|(_, it)| it.is_small() && outside(it.stack));
    if let Some((_, series)) = kept {
        return sites.user_frame(series.stack);
    }
    if !keeps_graph {
        return None;
    }
    let mut additions: BTreeMap<StackIndex, usize> = BTreeMap::new();
    for event in device.events.iter() {
        let is_scalar = event.action == Action::Alloc && event.size <= SCALAR_BYTES;
        if is_scalar && outside(event.stack) {
            *additions.entry(event.stack).or_default() += 1;
        }
    }
    let about_once_a_step = steps.boundaries.len() - 1..=steps.boundaries.len() + 1;
    let (&stack, _) = additions
        .iter()
        .find(|(stack, count)| about_once_a_step.contains(count) && sites.is_addition(**stack))?;
    sites.user_frame(stack)
}

/// What the growth comes down to, in words.
fn summary(growth: &[Growth], every: &str, culprit: Option<String>) -> Option<String> {
    let total: Bytes = growth.iter().map(|it| it.bytes_per_step).sum();
    let worst = growth.iter().map(|it| it.pattern).min()?;
    let at = culprit
        .map(|line| format!("; look at {line}"))
        .unwrap_or_default();
    Some(match worst {
        Pattern::KeptGraph => format!(
            "{total} more stay {every}: activations of forward outlive it, so something keeps every \
             step's autograd graph, as `total_loss += loss` does without `.item()` or `.detach()`{at}"
        ),
        Pattern::KeptScalar => format!(
            "{total} more stay {every}: a single number a step is kept as a tensor, as a loss that \
             is stored or added up (`total_loss += loss`) without `.item()` or `.detach()`{at}"
        ),
        Pattern::Kept => format!("{total} more stay {every}{at}"),
    })
}

/// Finds what is larger at the end of one snapshot than at the end of an earlier one.
pub(super) fn between(
    before: (&DeviceRecord, &Sites<'_>),
    after: (&DeviceRecord, &Judge<'_>),
    steps: Option<u64>,
) -> Found {
    let old = held_at_end(before.0, before.1);
    let new = held_at_end(after.0, after.1.sites);
    let divisor = steps.unwrap_or(1).max(1);
    let mut growth: Vec<Growth> = new
        .into_iter()
        .filter_map(|(stack, (bytes, index))| {
            let rise = bytes - old.get(&stack).map_or(Bytes::ZERO, |&(bytes, _)| bytes);
            (rise > Bytes::ZERO).then(|| Growth {
                bytes_per_step: Bytes(rise.0 / divisor),
                bytes: rise,
                steps,
                category: after.1.category_of_survivor(index),
                pattern: Pattern::Kept,
                stack,
            })
        })
        .collect();
    growth.sort_by_key(|it| std::cmp::Reverse(it.bytes));
    let graph = growth
        .iter()
        .filter(|it| it.category == Category::Activation)
        .count();
    if graph >= GRAPH_STACKS {
        for it in growth
            .iter_mut()
            .filter(|it| it.category == Category::Activation)
        {
            it.pattern = Pattern::KeptGraph;
        }
    }
    let summary = between_summary(&growth, steps);
    growth.truncate(MAX_GROWTH);
    Found { growth, summary }
}

fn between_summary(growth: &[Growth], steps: Option<u64>) -> Option<String> {
    let total: Bytes = growth.iter().map(|it| it.bytes).sum();
    let worst = growth.iter().map(|it| it.pattern).min()?;
    let span = match steps {
        Some(1) => "over 1 step".to_owned(),
        Some(steps) => format!("over {steps} steps"),
        None => "between the two snapshots".to_owned(),
    };
    let why = if worst == Pattern::KeptGraph {
        "; activations of forward outlive their step, so something keeps the autograd graph, as \
         `total_loss += loss` does without `.item()` or `.detach()`"
    } else {
        ""
    };
    Some(format!("{total} more are held {span}{why}"))
}

/// Bytes that tensors hold when a snapshot was taken, by stack.
fn held_at_end(device: &DeviceRecord, sites: &Sites<'_>) -> BTreeMap<String, (Bytes, StackIndex)> {
    let mut by_stack: BTreeMap<StackIndex, Bytes> = BTreeMap::new();
    for block in device.segments.iter().flat_map(|segment| &segment.blocks) {
        if block.state == BlockState::Allocated {
            *by_stack.entry(block.stack).or_default() += Bytes(block.size);
        }
    }
    let mut by_text: BTreeMap<String, (Bytes, StackIndex)> = BTreeMap::new();
    for (stack, bytes) in by_stack {
        let text = match stack {
            StackIndex::NONE => super::sites::NO_STACK.to_owned(),
            _ => sites.text(stack),
        };
        by_text.entry(text).or_insert((Bytes::ZERO, stack)).0 += bytes;
    }
    by_text
}

/// Steps between two snapshots: annotated optimizer steps of the later one that ended after the earlier
/// one's last event.
pub(super) fn steps_between(before: &Snapshot, after: &Snapshot) -> Option<u64> {
    let events = before.devices.iter().filter_map(|device| {
        let last = device.events.len().checked_sub(1)?;
        device.events.get(last)
    });
    let marks = before.annotations.iter().map(|mark| mark.time_us);
    let end = events.map(|event| event.time_us).chain(marks).max()?;
    let steps = after.annotations.iter().filter(|mark| {
        !mark.is_start
            && mark.time_us > end
            && after.texts.get(mark.name).starts_with("Optimizer.step")
    });
    let steps = steps.count() as u64;
    (steps > 0).then_some(steps)
}
