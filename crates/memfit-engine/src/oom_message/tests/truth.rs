//! Messages that the simulated allocator writes, judged against what it really held.
//!
//! Each case runs random requests on a random device until one is refused. Every cause named must be true of the exact numbers,
//! every true one must be named or left open, and what is said to be enough must serve the request when it is done.

use proptest::prelude::*;

use super::super::{Kind, OomCause, OomMessage};
use super::{causes, only, open};
use crate::allocator::{BlockId, Device, FreeOrder, OutOfMemory, Settings, Simulator};

const MIB: u64 = 1 << 20;
const POOL: (u64, u64) = (0, 1);

const SETTINGS: [&str; 6] = [
    "",
    "expandable_segments:True",
    "roundup_power2_divisions:4",
    "max_split_size_mb:40",
    "garbage_collection_threshold:0.6",
    "throw_on_cudamalloc_oom:True",
];

/// How torch writes the message.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wording {
    /// As torch 2 does where the driver names the processes.
    Second,
    /// In a container: this process is named as another one.
    InContainer,
    /// As torch 1 does, without processes and private pools.
    First,
}

#[derive(Debug, Clone)]
struct Case {
    settings: usize,
    total: u64,
    others: u64,
    own: u64,
    fraction: Option<f64>,
    /// What to ask for, and which block to free afterwards, if any.
    requests: Vec<(u64, Option<usize>)>,
    wording: Wording,
    /// The requests that go to a private pool.
    pool: std::ops::Range<usize>,
}

fn cases() -> impl Strategy<Value = Case> {
    let size = prop_oneof![
        2 => 1..MIB,
        3 => MIB..10 * MIB,
        3 => 10 * MIB..100 * MIB,
        1 => 100 * MIB..5000 * MIB,
    ];
    let requests = proptest::collection::vec((size, proptest::option::of(0_usize..1000)), 1..150);
    let device = (100_u64..6000, 0_u64..60, 0_u64..60);
    let fraction = proptest::option::of(0.1_f64..1.0);
    let wordings = [Wording::Second, Wording::InContainer, Wording::First];
    let form = (
        0..SETTINGS.len(),
        proptest::sample::select(wordings.to_vec()),
    );
    let pool = (0_usize..40, 0_usize..20);
    (form, device, fraction, requests, pool).prop_map(
        |((settings, wording), (total, others, own), fraction, requests, (start, length))| Case {
            settings,
            total: total * MIB + 12_345,
            others: total * MIB / 100 * others,
            own: total * MIB / 100 * (own.min(99 - others)),
            fraction,
            requests,
            // Torch 1 had no expandable segments.
            wording: if SETTINGS[settings].starts_with("expandable") && wording == Wording::First {
                Wording::Second
            } else {
                wording
            },
            pool: start..start + length,
        },
    )
}

/// Runs a case until a request is refused.
fn refused(case: &Case) -> Option<(Simulator, OutOfMemory)> {
    let mut device = Device::new(case.total);
    device.other_bytes = case.others + case.own;
    let mut settings = Settings::parse(SETTINGS[case.settings]).unwrap();
    settings.per_process_memory_fraction = case.fraction.unwrap_or(1.0);
    let mut simulator = Simulator::new(&settings, FreeOrder::default(), device);
    let mut held: Vec<BlockId> = Vec::new();
    for (number, &(size, freed)) in case.requests.iter().enumerate() {
        if number == case.pool.start {
            simulator.begin_pool(POOL, None);
        }
        if number == case.pool.end {
            simulator.end_pool(POOL);
        }
        match simulator.malloc(size, 0) {
            Ok(block) => held.push(block),
            Err(error) => return Some((simulator, error)),
        }
        if let Some(place) = freed {
            let block = held.swap_remove(place % held.len());
            simulator.free(block);
        }
    }
    None
}

/// The message as torch writes it.
fn text(case: &Case, error: &OutOfMemory) -> String {
    let size = |bytes: u64| {
        #[expect(clippy::cast_precision_loss, reason = "as torch prints it")]
        match bytes {
            0..=1024 => format!("{bytes} bytes"),
            _ if bytes <= MIB => format!("{:.2} KiB", bytes as f64 / 1024.0),
            _ if bytes <= 1 << 30 => format!("{:.2} MiB", bytes as f64 / MIB as f64),
            _ => format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64),
        }
    };
    let other = match case.others {
        0 => String::new(),
        held => format!("Process 77 has {} memory in use. ", size(held)),
    };
    let held = size(case.own + error.reserved_bytes);
    let own = match case.wording {
        Wording::Second => {
            format!("Including non-PyTorch memory, this process has {held} memory in use. ")
        }
        Wording::InContainer => format!("Process 88 has {held} memory in use. "),
        Wording::First if error.is_rejection => String::new(),
        Wording::First => {
            let allowed = error.allowed_bytes;
            let allowed = allowed.map_or_else(String::new, |it| format!("{} allowed; ", size(it)));
            return format!(
                "CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; \
                 {allowed}{} reserved in total by PyTorch)",
                size(error.segment_bytes),
                size(error.total_bytes),
                size(error.allocated_bytes),
                size(error.free_bytes),
                size(error.reserved_bytes)
            );
        }
    };
    error
        .to_string()
        .replacen("is free. ", &format!("is free. {other}{own}"), 1)
}

/// Whether a cause is true of the exact numbers.
fn is_true(cause: OomCause, of: &Case, error: &OutOfMemory) -> bool {
    let (asked, block, free) = (error.segment_bytes, error.block_bytes, error.free_bytes);
    let reserved = error.reserved_bytes;
    // Torch 1 counts what private pools do not use as unallocated.
    let private = match of.wording {
        Wording::First => 0,
        _ => error.private_free_bytes,
    };
    let unallocated = reserved - error.allocated_bytes - private;
    let limit = error.allowed_bytes.unwrap_or(u64::MAX);
    let usable = free.min(limit.saturating_sub(reserved));
    let was_missing = |held| asked > free && held > 0 && asked <= unallocated + free + held;
    match cause {
        OomCause::Limit => error.is_rejection || reserved + asked > limit,
        OomCause::ExpandableReserve => error.expandable_reserve_bytes.is_some_and(|it| it < asked),
        OomCause::TooMuchAlive => {
            block > unallocated + private + usable
                || error.allocated_bytes + block > error.total_bytes
        }
        OomCause::OtherProcesses => was_missing(of.others),
        OomCause::NonPytorch => was_missing(of.own),
        OomCause::PrivatePools => {
            block > unallocated + usable && private > 0 && asked <= unallocated + usable + private
        }
        OomCause::FragmentationPossible => {
            // Expandable segments grow by 20 MiB.
            let page = error.expandable_reserve_bytes.map_or(0, |_| 20 * MIB);
            let beside = if usable < asked + page { usable } else { 0 };
            unallocated > 0 && asked <= unallocated + beside
        }
        OomCause::DriverHadRoom => usable >= asked,
    }
}

const ALL: [OomCause; 8] = [
    OomCause::Limit,
    OomCause::ExpandableReserve,
    OomCause::TooMuchAlive,
    OomCause::OtherProcesses,
    OomCause::NonPytorch,
    OomCause::PrivatePools,
    OomCause::FragmentationPossible,
    OomCause::DriverHadRoom,
];

fn enough(message: &OomMessage, cause: OomCause) -> Option<bool> {
    let shown = message.causes.iter().find(|it| it.cause == cause)?;
    shown.is_enough
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let Some((mut simulator, error)) = refused(case) else {
        return Ok(());
    };
    let text = text(case, &error);
    let message = only(&text);
    prop_assert!(!message.is_cut, "{text}");
    let named = causes(&message);
    for &cause in &named {
        prop_assert!(
            is_true(cause, case, &error),
            "{cause:?} is not true: {text}\n{error:?}"
        );
    }
    if error.is_rejection {
        prop_assert_eq!(message.kind, Kind::Rejected);
        prop_assert_eq!(named, [OomCause::Limit]);
        return Ok(());
    }
    let left_open = open(&message);
    for cause in ALL {
        // A CUDA context is no cause, however small the request; torch 1 tells of no processes.
        let is_never_told = match cause {
            OomCause::NonPytorch => true,
            OomCause::OtherProcesses => case.wording == Wording::First,
            _ => false,
        };
        let is_told = named.contains(&cause) || left_open.contains(&cause) || is_never_told;
        prop_assert!(
            is_told || !is_true(cause, case, &error),
            "{cause:?} is silent: {text}\n{error:?}"
        );
    }
    // What is rejected beforehand has a limit in the settings, too.
    let rejects = SETTINGS[case.settings].starts_with("throw");
    if let Some(is_enough) = enough(&message, OomCause::Limit).filter(|_| !rejects) {
        simulator.set_memory_fraction(1.0);
        let is_served = simulator.malloc(error.requested_bytes, 0).is_ok();
        prop_assert!(
            is_served || !is_enough,
            "without the limit: {}\n{:?}",
            text,
            error
        );
    } else if enough(&message, OomCause::OtherProcesses) == Some(true) {
        simulator.set_other_bytes(case.own);
        prop_assert!(
            simulator.malloc(error.requested_bytes, 0).is_ok(),
            "without others: {text}"
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_cause_that_is_named_is_true_and_a_true_one_is_named_or_left_open(case in cases()) {
        check(&case)?;
    }
}

#[test]
fn the_cases_show_every_cause() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let mut seen: Vec<OomCause> = Vec::new();
    for _ in 0..600 {
        let case = cases().new_tree(&mut runner).unwrap().current();
        if let Some((_, error)) = refused(&case) {
            seen.extend(causes(&only(&text(&case, &error))));
        }
    }
    let count = |cause| seen.iter().filter(|&&it| it == cause).count();
    // A simulated driver refuses nothing that it has room for, and one without a limit reserves enough.
    for cause in &ALL[..7] {
        let least = usize::from(*cause != OomCause::ExpandableReserve);
        assert!(count(*cause) >= least, "{cause:?}: {}", count(*cause));
    }
}
