//! What a message decides, in sentences.
//!
//! Responsible for the words and for the command that tells the rest. Not responsible for what is shown.

use super::amount::Amount;
use super::document::{Kind, NextStep, OomCause, ShownCause, Undecided};
use super::numbers::Numbers;
use super::read::Message;
use crate::bytes::Bytes;

/// A smaller unattributed rest is what the driver itself keeps.
const WORTH_SAYING_BYTES: u64 = 128 << 20;

/// A cause that is shown, with its bytes.
pub(super) fn shown(
    cause: OomCause,
    numbers: &Numbers,
    bytes: Option<Amount>,
    is_enough: Option<bool>,
) -> String {
    let Numbers {
        request,
        free,
        unallocated,
        alive,
        total,
        ..
    } = numbers;
    let bytes = bytes.unwrap_or(Amount::UNKNOWN);
    match cause {
        OomCause::Limit => {
            let taken = if numbers.kind == Kind::DriverPool {
                format!("{alive} allocated")
            } else {
                format!("{} reserved", numbers.reserved)
            };
            let beside = match is_enough {
                Some(true) => format!("without it, {free} were free on the device"),
                Some(false) => format!("without it, too: only {free} were free on the device"),
                None => "whether the device had room without it is not told".to_owned(),
            };
            format!(
                "this process may take {bytes} (`per_process_memory_fraction`), and {taken} and {request} more \
                 exceed that; {beside}"
            )
        }
        OomCause::ExpandableReserve => format!(
            "an expandable segment reaches {bytes} at most here, and {request} were asked for: raise \
             `expandable_segments_reserve`"
        ),
        OomCause::TooMuchAlive if request.exceeds(*total) == Some(true) => {
            format!("{request} were asked for, and the device has {total}")
        }
        OomCause::TooMuchAlive => {
            let beside = if unallocated.is_known() && free.low_bytes > Bytes::ZERO
                || unallocated.is_known() && free.high_bytes == Bytes::ZERO
            {
                let usable = numbers.usable();
                format!(
                    "beside them {usable} could be taken and {unallocated} were reserved but unallocated"
                )
            } else {
                format!("the device has {total}")
            };
            format!(
                "tensors hold {alive}, and {beside}: {request} more do not fit, however they are arranged; {} \
                 must go",
                at_least(bytes)
            )
        }
        OomCause::OtherProcesses => format!(
            "other processes hold {bytes}, and {free} were free for the {request} asked for"
        ),
        OomCause::NonPytorch => format!(
            "{bytes} of this process are not PyTorch's: a CUDA context takes up to about 1 GiB, the rest belongs to \
             libraries or other frameworks"
        ),
        OomCause::PrivatePools => {
            format!("{bytes} lie unused in private pools: only their own CUDA graphs can use them")
        }
        OomCause::FragmentationPossible => format!(
            "fragmentation is possible: {unallocated} reserved but unallocated and {} that could be taken \
             would hold the {request} asked for; they may lie in pieces, belong to another pool or wait for another \
             stream",
            numbers.usable()
        ),
        OomCause::DriverHadRoom => format!(
            "{bytes} could be taken when the message was written, enough for the {request} asked for: \
             somebody let memory go in between, or something outside PyTorch sets a limit"
        ),
    }
}

/// A cause that rounding, or a number that is a range for another reason, leaves open.
pub(super) fn open(cause: OomCause, numbers: &Numbers) -> String {
    let what = match cause {
        OomCause::Limit => "whether the limit of this process was reached",
        OomCause::ExpandableReserve => "whether an expandable segment was too short",
        OomCause::TooMuchAlive => "whether too much was alive",
        OomCause::OtherProcesses => "whether what other processes hold was missing",
        OomCause::NonPytorch => "whether what libraries hold was missing",
        OomCause::PrivatePools => "whether what private pools hold was missing",
        OomCause::FragmentationPossible => "whether fragmentation is possible",
        OomCause::DriverHadRoom => "whether the driver had room",
    };
    let is_segment = numbers.need.low_bytes.0 * 2 <= numbers.request.low_bytes.0;
    let is_containers = cause == OomCause::OtherProcesses
        && numbers.others.low_bytes.0 < numbers.others.high_bytes.0 / 2;
    let is_page = cause == OomCause::DriverHadRoom
        && numbers.usable().at_least(numbers.request) == Some(true);
    let why = if is_page {
        "expandable segments grow by 20 MiB at a time".to_owned()
    } else if is_containers {
        "a process that the message names may be this one, seen from outside its container"
            .to_owned()
    } else if is_segment {
        format!(
            "{} is what PyTorch asks the driver for when a request is smaller, and the message does not tell the \
             request",
            numbers.request
        )
    } else {
        "the numbers are rounded to two decimals, and the difference is smaller than that"
            .to_owned()
    };
    format!("{what} cannot be told: {why}")
}

/// Memory of the device that the message attributes to no process.
pub(super) fn unattributed(
    message: &Message,
    numbers: &Numbers,
    causes: &[ShownCause],
) -> Option<Undecided> {
    let is_whole = message.kind == Kind::Allocator && !message.is_cut;
    let has_room = causes.iter().any(|it| it.cause == OomCause::DriverHadRoom);
    if !is_whole || has_room || !numbers.outside.is_known() {
        return None;
    }
    let say = |summary| {
        Some(Undecided {
            cause: OomCause::OtherProcesses,
            summary,
        })
    };
    let outside = numbers.outside;
    let Some(own) = numbers.non_pytorch else {
        if !message.other_processes.is_empty() {
            return say(format!(
                "the message does not tell what this process holds in all: {outside} of the device are neither \
                 free nor PyTorch's, and a process that it names may be this one, seen from outside its container"
            ));
        }
        if outside.low_bytes.0 < WORTH_SAYING_BYTES {
            return None;
        }
        return say(format!(
            "{outside} of the device are neither free nor PyTorch's: the CUDA context and libraries of this process, or \
             other processes; the message does not tell which"
        ));
    };
    let nobodys = outside.minus(own).minus(numbers.others);
    if nobodys.low_bytes.0 < WORTH_SAYING_BYTES {
        return None;
    }
    say(format!(
        "{nobodys} of the device belong to no process that the message names: processes that the driver does not show \
         here, such as those outside this container, or the driver itself"
    ))
}

/// What a rejected request says itself.
pub(super) fn rejected(message: &Message) -> String {
    let asked = message
        .requested
        .map_or_else(String::new, |it| format!(" of {it}"));
    format!(
        "a request{asked} would have exceeded the limit of this process (`per_process_memory_fraction`), so PyTorch did not \
         ask the driver (`throw_on_cudamalloc_oom`); the message holds no other number"
    )
}

/// What a message comes down to.
pub(super) fn summary(message: &Message, numbers: &Numbers, causes: &[ShownCause]) -> String {
    match message.kind {
        Kind::Host => {
            let asked = message
                .requested
                .map_or_else(|| "memory".to_owned(), |it| it.to_string());
            return format!(
                "the host refused {asked}: this is the machine's memory, not a GPU's, and the message holds no other number"
            );
        }
        Kind::Driver => {
            return "the driver or a library ran out of memory outside PyTorch's allocator: the message holds no number, so it \
                    decides nothing"
                .to_owned();
        }
        _ => {}
    }
    if message.requested.is_some_and(|it| !it.is_known()) {
        return "more than 1 EiB was asked for: no device has that, so a size in the program is wrong".to_owned();
    }
    let missing = missing(message);
    let rest = if missing.is_empty() {
        String::new()
    } else {
        let ends = if message.is_cut {
            "ends early"
        } else {
            "is short"
        };
        format!(
            "the message {ends} and does not tell {}",
            missing.join(", ")
        )
    };
    let names: Vec<&str> = causes.iter().map(|it| name(it.cause)).collect();
    let text = match names.as_slice() {
        [] if rest.is_empty() => "the numbers are rounded and decide nothing".to_owned(),
        [] => return format!("{rest}: nothing is decided"),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} and {last}; {}", first.join(", "), remedy(causes)),
    };
    if rest.is_empty() || numbers.kind == Kind::Rejected {
        text
    } else {
        format!("{text}; {rest}")
    }
}

/// Which of several causes have to change.
fn remedy(causes: &[ShownCause]) -> String {
    let told = |answer| causes.iter().filter(move |it| it.is_enough == answer);
    let enough: Vec<&str> = told(Some(true)).map(|it| changed(it.cause)).collect();
    match enough.as_slice() {
        [] if told(None).next().is_none() => "none of them alone is enough".to_owned(),
        [] => "which of them is enough is not told".to_owned(),
        [only] => format!("it is enough that {only}"),
        [first @ .., last] => format!("it is enough that {} or {last}", first.join(", ")),
    }
}

const fn name(cause: OomCause) -> &'static str {
    match cause {
        OomCause::Limit => "a limit of this process refused",
        OomCause::ExpandableReserve => "an expandable segment is too short for the request",
        OomCause::TooMuchAlive => "too much is alive",
        OomCause::OtherProcesses => "other processes hold what was missing",
        OomCause::NonPytorch => "this process holds what was missing outside PyTorch",
        OomCause::PrivatePools => "private pools hold what was missing",
        OomCause::FragmentationPossible => "fragmentation is possible",
        OomCause::DriverHadRoom => "the driver refused although there was room",
    }
}

const fn changed(cause: OomCause) -> &'static str {
    match cause {
        OomCause::Limit => "the limit is raised",
        OomCause::ExpandableReserve => "the reserve of expandable segments is raised",
        OomCause::TooMuchAlive => "less is alive",
        OomCause::OtherProcesses => "the other processes let go of theirs",
        OomCause::NonPytorch => "this process holds less outside PyTorch",
        OomCause::PrivatePools => "the private pools are given up",
        OomCause::FragmentationPossible => "the unallocated bytes lie in one piece",
        OomCause::DriverHadRoom => "the driver allows it",
    }
}

/// Numbers that other messages of this kind have.
fn missing(message: &Message) -> Vec<&'static str> {
    let of_pool = message.kind == Kind::DriverPool;
    let all = [
        ("the request", message.requested.is_some(), true),
        ("the device's memory", message.total.is_some(), true),
        ("the free memory", message.free.is_some(), true),
        ("the allocated memory", message.allocated.is_some(), true),
        (
            "the unallocated memory",
            message.unallocated.is_some(),
            !of_pool,
        ),
    ];
    let lost = all
        .iter()
        .filter(|(_, is_told, is_usual)| *is_usual && !is_told);
    lost.map(|&(name, ..)| name).collect()
}

/// Commands that tell the rest, the most useful first.
pub(super) fn next(
    message: &Message,
    causes: &[ShownCause],
    undecided: &[Undecided],
) -> Vec<NextStep> {
    let step = |command: &str, tells: &str| NextStep {
        command: command.to_owned(),
        tells: tells.to_owned(),
    };
    if message.kind == Kind::Host {
        return vec![step(
            "memfit run SCRIPT.py",
            "counts what the script takes of the host's memory, and says what held it at the peak",
        )];
    }
    let device_memory = message.total.map(|total| {
        // Rounded down to a megabyte, which `--device-memory` reads.
        let middle = total.low_bytes.0 + (total.high_bytes - total.low_bytes).0 / 2;
        format!(" --device-memory {}MiB", middle >> 20)
    });
    let explain = format!(
        "memfit run --snapshot oom.pickle SCRIPT.py; memfit explain oom.pickle{}",
        device_memory.unwrap_or_default()
    );
    let record = step(
        &explain,
        "records the history up to the refusal: who holds what is alive, and whether the rest lies in pieces",
    );
    let devices = step("memfit devices", "who holds how much of each device now");
    let is_others = |cause: OomCause| {
        matches!(
            cause,
            OomCause::OtherProcesses | OomCause::NonPytorch | OomCause::DriverHadRoom
        )
    };
    let alone = causes.iter().all(|it| is_others(it.cause));
    let asks_devices = message.kind == Kind::Driver
        || causes.iter().any(|it| is_others(it.cause))
        || undecided.iter().any(|it| is_others(it.cause));
    match (asks_devices, alone && !causes.is_empty()) {
        (true, true) => vec![devices, record],
        (true, false) => vec![record, devices],
        (false, _) => vec![record],
    }
}

fn at_least(bytes: Amount) -> String {
    if bytes.is_known() {
        format!("at least {}", bytes.low_bytes.max(Bytes(1)))
    } else {
        "some".to_owned()
    }
}
