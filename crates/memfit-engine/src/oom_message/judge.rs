//! Which causes the numbers of a message show.
//!
//! Not responsible for the arithmetic (`numbers.rs`) nor for the words.

use super::amount::Amount;
use super::document::{Kind, OomCause, OomMessage, ShownCause, Undecided};
use super::numbers::{Answer, Numbers};
use super::read::Message;
use super::words;

/// Says what a message decides.
pub(super) fn explain(message: &Message, count: u64) -> OomMessage {
    let numbers = Numbers::of(message);
    let (causes, mut undecided) = judged(message, &numbers);
    undecided.extend(words::unattributed(message, &numbers, &causes));
    let has_private = message.private_free.is_some();
    OomMessage {
        count,
        kind: message.kind,
        device: message.device,
        requested: message.requested,
        total: message.total,
        free: message.free,
        allocated: message.allocated.map(|_| numbers.alive),
        unallocated: message.unallocated,
        private_unallocated: has_private.then_some(numbers.private),
        reserved: message.reserved,
        allowed: message.allowed,
        this_process: message.this_process,
        non_pytorch: numbers.non_pytorch,
        other_processes: message.other_processes.clone(),
        is_expandable: message.is_expandable,
        expandable_reserve: message.expandable_reserve,
        is_cut: message.is_cut,
        summary: words::summary(message, &numbers, &causes),
        next: words::next(message, &causes, &undecided),
        causes,
        undecided,
    }
}

fn judged(message: &Message, numbers: &Numbers) -> (Vec<ShownCause>, Vec<Undecided>) {
    let (mut causes, mut undecided) = (Vec::new(), Vec::new());
    if message.kind == Kind::Rejected {
        let summary = words::rejected(message);
        causes.push(ShownCause {
            cause: OomCause::Limit,
            bytes: None,
            is_enough: None,
            summary,
        });
    }
    if matches!(message.kind, Kind::Rejected | Kind::Driver | Kind::Host) {
        return (causes, undecided);
    }
    let beyond = numbers.beyond_context();
    let with = |held: Option<Amount>, ask: fn(&Numbers, Amount) -> Answer| {
        held.map_or(Some(false), |held| ask(numbers, held))
    };
    // Without a limit in a message that is whole, there is none.
    let limit = match numbers.limit {
        None => Some(false),
        Some(_) => numbers.limit_refused(),
    };
    let device_has_it = numbers.device_serves(Amount::ZERO);
    let asked: [(OomCause, Answer, Option<Amount>, Answer); 8] = [
        (OomCause::Limit, limit, numbers.limit, device_has_it),
        (
            OomCause::ExpandableReserve,
            Some(numbers.reserve.is_some()),
            numbers.reserve,
            device_has_it,
        ),
        (
            OomCause::TooMuchAlive,
            numbers.too_much_is_alive(),
            Some(numbers.excess()),
            Some(true),
        ),
        (
            OomCause::OtherProcesses,
            numbers.was_missing(numbers.others),
            Some(numbers.others),
            numbers.is_enough(numbers.others),
        ),
        (
            OomCause::NonPytorch,
            with(beyond, Numbers::was_missing),
            numbers.non_pytorch,
            with(beyond, Numbers::is_enough),
        ),
        (
            OomCause::PrivatePools,
            numbers.private_pools_hold_it(),
            Some(numbers.private),
            // Whether a pool's free blocks can go to the driver is not told.
            None,
        ),
        (
            OomCause::FragmentationPossible,
            numbers.fragmentation_is_possible(),
            Some(numbers.unallocated),
            Some(true),
        ),
        (
            OomCause::DriverHadRoom,
            numbers.driver_had_room(),
            Some(numbers.usable()),
            None,
        ),
    ];
    let are_all_told = !message.is_cut
        && [numbers.request, numbers.free, numbers.unallocated]
            .iter()
            .all(|it| it.is_known());
    for (cause, answer, bytes, is_enough) in asked {
        match answer {
            Some(true) => {
                let summary = words::shown(cause, numbers, bytes, is_enough);
                let bytes = bytes.filter(|it| it.is_known());
                causes.push(ShownCause {
                    cause,
                    bytes,
                    is_enough,
                    summary,
                });
            }
            // Where numbers are missing, that is said once, in the summary.
            None if are_all_told => {
                let summary = words::open(cause, numbers);
                undecided.push(Undecided { cause, summary });
            }
            _ => {}
        }
    }
    (causes, undecided)
}
