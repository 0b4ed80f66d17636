//! Who owns the bytes of a moment: by category, by module or autograd node, and by stack.
//!
//! Responsible for saying what a block was for, and why that is believed. Not responsible for reading
//! frames (`sites.rs`).
//!
//! A snapshot says who asked for a block, not what for. The first rule that holds decides; *dies within*
//! means that it was let go in the same uninterrupted run of the phase it was made in.
//!
//! | # | category | when |
//! |---|---|---|
//! | 1 | as named | the profiler recorded a category |
//! | 2 | workspace | cuBLAS' or cuDNN's own scratch (`getNewWorkspace`, `Workspace::Workspace`) |
//! | 3 | communication | `c10d`, or the innermost Python frame is in `torch/distributed` |
//! | 4 | temporary | frames of an optimizer's step, dies within it |
//! | 5 | optimizer state | frames of an optimizer's step |
//! | 6 | activation | forward inside backward: computed again by activation checkpointing |
//! | 7 | gradient | `AccumulateGrad` |
//! | 8 | temporary | frames of autograd's engine, dies within backward |
//! | 9 | gradient | frames of autograd's engine, outlives backward |
//! | 10 | KV cache | `transformers/cache_utils.py`, or a function with `kv_cache` in its name |
//! | 10 | checkpoint | `torch.load`, `safetensors`, transformers' own loading, or a function named `safetensors` or `weights_iterator` |
//! | 11 | parameter | a module is built, loaded, or moved (`__init__`, `_apply`, `load_state_dict`) |
//! | 12 | activation | a module's `forward`, or `torch.nn.functional` |
//! | 13 | activation | let go by backward |
//! | 14 | gradient | let go by `zero_grad` |
//! | 15 | optimizer state | alive before recording, let go by an optimizer's step |
//! | 16 | input | `torch/utils/data`, `pin_memory`, a collate function |
//! | 17 | unknown | none of these |
//!
//! With stacks of Python only, an event without frames that was recorded beside others with frames counts as
//! backward: autograd's threads have no Python frames.

use std::collections::BTreeMap;

use super::history::History;
use super::life::{Allocation, NEVER};
use super::peak::event_of;
use super::sites::{BEFORE_RECORDING, NO_STACK, Phase, Sites};
use crate::bytes::Bytes;
use crate::snapshot::{Action, DeviceRecord, PoolIndex, Snapshot, StackIndex, TextIndex};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a block was for.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "SnapshotCategory")]
pub enum Category {
    /// A parameter or buffer of a module.
    Parameter,
    /// The gradient of a parameter.
    Gradient,
    /// State of the optimizer.
    OptimizerState,
    /// Made by forward.
    Activation,
    /// Made and gone within backward or within the optimizer's step.
    Temporary,
    /// Scratch of a library.
    Workspace,
    /// A batch.
    Input,
    /// Keys and values kept for generation.
    KvCache,
    /// Read from a file of weights.
    Checkpoint,
    /// A collective's.
    Communication,
    /// Nothing tells.
    Unknown,
}

impl Category {
    /// The word used in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::Gradient => "gradient",
            Self::OptimizerState => "optimizer_state",
            Self::Activation => "activation",
            Self::Temporary => "temporary",
            Self::Workspace => "workspace",
            Self::Input => "input",
            Self::KvCache => "kv_cache",
            Self::Checkpoint => "checkpoint",
            Self::Communication => "communication",
            Self::Unknown => "unknown",
        }
    }

    /// A category as the profiler names it (`torch/profiler/_memory_profiler.py`, `Category`).
    fn of_profiler(label: &str) -> Option<Self> {
        Some(match label {
            "PARAMETER" => Self::Parameter,
            "GRADIENT" => Self::Gradient,
            "OPTIMIZER_STATE" => Self::OptimizerState,
            "ACTIVATION" => Self::Activation,
            "TEMPORARY" | "AUTOGRAD_DETAIL" => Self::Temporary,
            "INPUT" => Self::Input,
            _ => return None,
        })
    }
}

/// Why a category is believed: one word for each reason in the table above.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// Rule 1.
    Profiler,
    /// The stack alone: rules 2, 3, 5, 6, 7, 10, 11, 12, 16.
    Stack,
    /// The stack and when it was let go: rules 4, 8, 9.
    StackAndLife,
    /// When it was let go: rules 13, 14, 15.
    Life,
    /// Rule 17.
    None,
}

/// Bytes that one stack holds for one purpose.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Owner {
    /// Frames, one a line, innermost first, as `file:line function`.
    pub stack: String,
    /// What for.
    pub category: Category,
    /// Of its blocks.
    pub bytes: Bytes,
    /// Number of blocks.
    pub count: u64,
    /// Chain of modules from the outermost in, or the autograd node.
    pub module: String,
    /// Why the category is believed.
    pub evidence: Evidence,
}

/// Uninterrupted runs of one phase over the events of a device.
#[derive(Debug)]
pub struct Runs {
    /// First state of each run and its phase.
    runs: Vec<(u32, Phase)>,
}

impl Runs {
    /// The runs of a device.
    #[must_use]
    pub fn of(snapshot: &Snapshot, device: &DeviceRecord, sites: &Sites<'_>) -> Self {
        let has_stacks = device
            .events
            .iter()
            .any(|event| event.action == Action::Alloc && event.stack != StackIndex::NONE);
        let steps = OptimizerSteps::of(snapshot, device.index);
        let mut runs = vec![(0, Phase::Forward)];
        for (state, event) in (1..NEVER).zip(device.events.iter()) {
            if event.action != Action::Alloc {
                continue;
            }
            let phase = if event.stack != StackIndex::NONE {
                sites.get(event.stack).phase()
            } else if steps.hold(event.time_us) {
                Phase::Optimizer
            } else if has_stacks {
                Phase::Backward
            } else {
                Phase::Forward
            };
            if runs.last().is_none_or(|&(_, last)| last != phase) {
                runs.push((state, phase));
            }
        }
        Self { runs }
    }

    /// The run a state belongs to, and its phase.
    #[must_use]
    pub fn at(&self, state: u32) -> (usize, Phase) {
        let index = self.runs.partition_point(|&(start, _)| start <= state);
        let index = index.saturating_sub(1);
        (index, self.runs[index].1)
    }

    /// The first state of every run of a phase and the first state after it; a run that lasts to the end of
    /// the trace is left out, as it may not be over.
    #[must_use]
    pub fn whole(&self, phase: Phase) -> Vec<(u32, u32)> {
        let pairs = self.runs.windows(2);
        pairs
            .filter(|pair| pair[0].1 == phase)
            .map(|pair| (pair[0].0, pair[1].0))
            .collect()
    }
}

/// Times of annotated optimizer steps.
struct OptimizerSteps {
    ranges: Vec<(u64, u64)>,
}

impl OptimizerSteps {
    fn of(snapshot: &Snapshot, device: u32) -> Self {
        let mut ranges = Vec::new();
        let mut open = None;
        for mark in &snapshot.annotations {
            let name = snapshot.texts.get(mark.name);
            if mark.device != device || !name.starts_with("Optimizer.step") {
                continue;
            }
            match open.take() {
                None if mark.is_start => open = Some(mark.time_us),
                Some(start) if !mark.is_start => ranges.push((start, mark.time_us)),
                _ => {}
            }
        }
        ranges.sort_unstable();
        Self { ranges }
    }

    fn hold(&self, time_us: u64) -> bool {
        let after = self.ranges.partition_point(|&(start, _)| start <= time_us);
        after > 0 && time_us <= self.ranges[after - 1].1
    }
}

/// Says what blocks are for.
#[derive(Debug)]
pub struct Judge<'a> {
    /// The snapshot.
    pub snapshot: &'a Snapshot,
    /// The device.
    pub device: &'a DeviceRecord,
    /// The snapshot's stacks.
    pub sites: &'a Sites<'a>,
    /// The device's runs.
    pub runs: &'a Runs,
}

impl Judge<'_> {
    /// What a block was for, and why that is believed.
    #[must_use]
    pub fn category(&self, allocation: &Allocation) -> (Category, Evidence) {
        let label = self.snapshot.texts.get(allocation.label);
        if let Some(category) = Category::of_profiler(label) {
            return (category, Evidence::Profiler);
        }
        let site = self.sites.get(allocation.stack);
        let stack = |category| (category, Evidence::Stack);
        if site.is_workspace() {
            return stack(Category::Workspace);
        }
        if site.is_communication() {
            return stack(Category::Communication);
        }
        let is_before = allocation.start == 0;
        let (run, phase) = self.runs.at(allocation.start);
        let phase = if allocation.stack == StackIndex::NONE && !is_before {
            phase
        } else {
            site.phase()
        };
        let end = (allocation.let_go != NEVER).then(|| self.runs.at(allocation.let_go));
        let dies_within = !is_before && end.is_some_and(|(end, _)| end == run);
        match phase {
            Phase::Optimizer if dies_within => (Category::Temporary, Evidence::StackAndLife),
            Phase::Optimizer => stack(Category::OptimizerState),
            Phase::Backward if site.is_recomputed() => stack(Category::Activation),
            Phase::Backward if site.accumulates_gradient() => stack(Category::Gradient),
            Phase::Backward if dies_within => (Category::Temporary, Evidence::StackAndLife),
            Phase::Backward => (Category::Gradient, Evidence::StackAndLife),
            Phase::Forward if site.is_kv_cache() => stack(Category::KvCache),
            Phase::Forward if site.is_checkpoint() => stack(Category::Checkpoint),
            Phase::Forward if site.is_module_setup() => stack(Category::Parameter),
            Phase::Forward if site.is_in_forward() => stack(Category::Activation),
            Phase::Forward => match self.category_by_end(allocation) {
                Some(category) => (category, Evidence::Life),
                None if site.is_input() => stack(Category::Input),
                None => (Category::Unknown, Evidence::None),
            },
        }
    }

    /// What a block was for, by who let it go.
    fn category_by_end(&self, allocation: &Allocation) -> Option<Category> {
        let position = event_of(allocation.let_go).filter(|_| allocation.let_go != NEVER)?;
        let event = self.device.events.get(usize::try_from(position).ok()?)?;
        if self.sites.get(event.stack).is_zero_grad() {
            return Some(Category::Gradient);
        }
        match self.runs.at(allocation.let_go).1 {
            Phase::Backward => Some(Category::Activation),
            Phase::Optimizer if allocation.start == 0 => Some(Category::OptimizerState),
            _ => None,
        }
    }

    /// What a block that outlives the recording was for, by its stack alone.
    #[must_use]
    pub fn category_of_survivor(&self, stack: StackIndex) -> Category {
        let survivor = Allocation {
            address: 0,
            size: 0,
            requested_size: 0,
            start: 0,
            let_go: NEVER,
            end: NEVER,
            stack,
            label: TextIndex::default(),
            pool: PoolIndex::DEFAULT,
        };
        self.category(&survivor).0
    }

    /// The text of an allocation's stack.
    #[must_use]
    pub fn stack_text(&self, allocation: &Allocation) -> String {
        if allocation.stack != StackIndex::NONE {
            return self.sites.text(allocation.stack);
        }
        let missing = if allocation.start == 0 {
            BEFORE_RECORDING
        } else {
            NO_STACK
        };
        missing.to_owned()
    }

    /// Who owns the allocated bytes of a state: largest first, then by stack and category.
    #[must_use]
    pub fn owners(&self, history: &History, state: u32) -> Vec<Owner> {
        // By what the file distinguishes, then by what a person does: stacks that differ only in
        // plumbing are one.
        let mut by_index: BTreeMap<(StackIndex, bool, Category, Evidence), (Bytes, u64)> =
            BTreeMap::new();
        for allocation in &history.allocations {
            if !allocation.is_allocated_at(state) {
                continue;
            }
            let (category, evidence) = self.category(allocation);
            let key = (allocation.stack, allocation.start == 0, category, evidence);
            let (bytes, count) = by_index.entry(key).or_default();
            *bytes += Bytes(allocation.size);
            *count += 1;
        }
        let mut by_text: BTreeMap<(String, Category), Owner> = BTreeMap::new();
        for ((stack, is_before, category, evidence), (bytes, count)) in by_index {
            let text = match stack {
                StackIndex::NONE if is_before => BEFORE_RECORDING.to_owned(),
                StackIndex::NONE => NO_STACK.to_owned(),
                _ => self.sites.text(stack),
            };
            let owner = by_text
                .entry((text, category))
                .or_insert_with_key(|(text, _)| Owner {
                    stack: text.clone(),
                    category,
                    bytes: Bytes::ZERO,
                    count: 0,
                    module: self.sites.module(stack),
                    evidence,
                });
            owner.bytes += bytes;
            owner.count += count;
        }
        let mut owners: Vec<Owner> = by_text.into_values().collect();
        // The map's order decides among equals.
        owners.sort_by_key(|owner| std::cmp::Reverse(owner.bytes));
        owners
    }
}

/// Owners told one by one; the rest is one owner.
const MAX_OWNERS: usize = 1000;

/// The largest owners, and the others as one.
pub(super) fn limited(mut owners: Vec<Owner>) -> Vec<Owner> {
    if owners.len() <= MAX_OWNERS {
        return owners;
    }
    let others = owners.split_off(MAX_OWNERS - 1);
    owners.push(Owner {
        stack: format!("({} smaller owners)", others.len()),
        category: Category::Unknown,
        bytes: others.iter().map(|it| it.bytes).sum(),
        count: others.iter().map(|it| it.count).sum(),
        module: String::new(),
        evidence: Evidence::None,
    });
    owners
}
