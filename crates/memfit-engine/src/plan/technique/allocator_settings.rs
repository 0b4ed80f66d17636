//! Whether the caching allocator lets a plan run.
//!
//! Responsible for asking the simulated allocator about a candidate on CUDA: requests that fit may still be
//! refused, because free memory lies in pieces; and for the action that sets the allocator up. Not responsible for the simulation ([`crate::predict::reserved`]) nor
//! for what to do about a refusal (`choose.rs`).

use super::{ActsOn, Technique};
use crate::allocator::Settings;
use crate::bytes::Bytes;
use crate::plan::{Action, ActionKind, Class, Details};
use crate::predict::reserved::{EXPANDABLE, Requests, Reserved};
use crate::step::lives::lives;
use crate::step::{StepModel, Treatment, Variant};
use crate::trace::Trace;

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::AllocatorSettings,
    name: "allocator_settings",
    title: "allocator settings",
    help: "Set up PyTorch's caching allocator (CUDA)",
    promise: Class::Exact,
    effect: |_| "free memory is not lost to fragmentation".to_owned(),
    short: None,
    acts_on: ActsOn::Allocator,
    only_where_needed: false,
    // Who refuses is the allocator, and a note says so.
    refusal: |_, _| None,
    // Decided last, when the allocator is asked about what was chosen: `action`.
    is_used: |_, _| false,
    write: |_, _| {},
};

/// What the allocator says about a candidate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::plan) enum Answer {
    /// Not a CUDA step: memory comes from the system, without segments.
    NotAsked,
    /// It runs, under these settings, which hold so many bytes less than the defaults.
    Runs(Reserved, Bytes),
    /// A request is refused, under any settings tried.
    Refuses(Reserved),
}

/// Asks about the step with `dropped[allocation]` on a device with `cap` bytes for it.
pub(in crate::plan) fn ask(
    trace: &Trace,
    variant: Variant,
    dropped: &[Treatment],
    cap: Bytes,
    may_set: bool,
) -> Answer {
    if trace.meta.device_kind != "cuda" {
        return Answer::NotAsked;
    }
    let lives = lives(trace, &StepModel::new(trace, variant), dropped);
    let requests = Requests::new(trace, &lives);
    let default = Settings::default();
    let by_default = requests.reserved(&default, "");
    if requests.within(&default, cap).is_ok() {
        return Answer::Runs(by_default, Bytes::ZERO);
    }
    match Settings::parse(EXPANDABLE) {
        Ok(settings) if may_set && requests.within(&settings, cap).is_ok() => {
            let reserved = requests.reserved(&settings, EXPANDABLE);
            let less = by_default.peak_reserved_bytes - reserved.peak_reserved_bytes;
            Answer::Runs(reserved, less)
        }
        _ => Answer::Refuses(by_default),
    }
}

/// The action that goes with an answer, if one does.
pub(in crate::plan) fn action(reserved: &Reserved, less: Bytes) -> Option<Action> {
    let settings = reserved.settings.clone();
    let details = Details::AllocatorSettings { settings };
    (!reserved.settings.is_empty()).then(|| Action::new(details, 1, less))
}
