//! What pins segments, what a refusal came from, and what private pools have to do with it.

use super::*;

#[test]
fn survivors_that_pin_segments_are_named() {
    let mut machine = Machine::new();
    let (large, small) = (
        machine.stack(&["a.py:1 big"]),
        machine.stack(&["a.py:2 survivor"]),
    );
    // Each 20 MiB segment gets a survivor of 2 MiB between blocks that go.
    for _ in 0..4 {
        let blocks = [8, 8].map(|mib| machine.malloc(mib * MIB, 0, large));
        machine.malloc(4 * MIB, 0, small);
        for block in blocks {
            machine.free(block, false);
        }
        machine.malloc(30 * MIB, 0, large);
    }
    let device = machine.explained(0);
    let found = &device.fragmentation;
    let totals = machine.truth[usize::try_from(device.peak.event.unwrap()).unwrap() + 1].0;
    assert_eq!(
        found.inactive_bytes,
        totals.reserved_bytes - totals.active_bytes
    );
    assert_eq!(found.verdict, Verdict::Fragmented);
    assert_eq!(found.releasable_bytes, Bytes::ZERO);
    let first = &found.pinned_segments[0];
    assert_eq!(
        (first.bytes, first.inactive_bytes),
        (Bytes(20 * MIB), Bytes(16 * MIB))
    );
    assert_eq!(first.blocks[0].stack, "a.py:2 survivor");
    assert_eq!(first.blocks[0].bytes, Bytes(4 * MIB));
}

/// A block that another stream still reads keeps its segment only until the allocator waits for it.
#[test]
fn what_waits_for_another_stream_is_no_fragmentation() {
    for waits in [true, false] {
        let mut machine = Machine::new();
        let stack = machine.stack(&["a.py:1 big"]);
        let whole = machine.malloc(100 * MIB, 0, stack);
        machine.free(whole, false);
        let pin = machine.malloc(20 * MIB, 0, stack);
        if waits {
            machine.free(pin, true);
        }
        machine.malloc(200 * MIB, 7, stack);
        let device = machine.explained(0);
        let verdict = device.fragmentation.verdict;
        assert_eq!(verdict == Verdict::Fragmented, !waits, "{verdict:?}");
    }
}

/// Expandable segments of the small pool grow by pages of 2 MiB, as a trace shows, and shrink by them.
#[test]
fn pages_of_small_blocks_go_back_one_by_one() {
    let mut machine = Machine::new();
    machine.is_expandable = true;
    let stack = machine.stack(&["a.py:1 f"]);
    let blocks: Vec<u64> = (0..5).map(|_| machine.malloc(MIB, 0, stack)).collect();
    for &block in &blocks[1..] {
        machine.free(block, false);
    }
    let end = machine.explained(0).end;
    assert_eq!(
        (end.releasable_bytes, end.stuck_bytes),
        (Bytes(4 * MIB), Bytes(MIB))
    );
    machine.empty_cache();
    let device = machine.explained(0);
    let at_peak = device.fragmentation.inactive_bytes;
    assert_eq!(
        (at_peak, device.end.releasable_bytes),
        (Bytes(MIB), Bytes::ZERO)
    );
}

#[test]
fn a_cache_that_can_go_back_is_no_fragmentation() {
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 big"]);
    let blocks = [100, 40].map(|mib| machine.malloc(mib * MIB, 0, stack));
    machine.free(blocks[1], false);
    machine.malloc(12 * MIB, 7, stack);
    machine.malloc(60 * MIB, 0, stack);
    let device = machine.explained(0);
    assert_eq!(device.fragmentation.verdict, Verdict::Cached);
    assert_eq!(device.fragmentation.releasable_bytes, Bytes(40 * MIB));
    assert_eq!(device.fragmentation.pinned_segments, []);
}

/// Explains a refusal of `need` with `free` bytes free on a device of `memory` bytes.
fn refused(
    machine: &mut Machine,
    need: u64,
    free: u64,
    memory: Option<u64>,
) -> crate::explain::OutOfMemory {
    let stack = machine.stack(&["train.py:9 main"]);
    machine.record(Action::OutOfMemory, free, need, stack);
    let request = Request {
        device_memory: memory.map(Bytes),
        ..Request::default()
    };
    let mut explanation = explain(&machine.snapshot(0), &request);
    assert_eq!(explanation.problems, []);
    let mut refusals = explanation.devices.remove(0).oom;
    assert_eq!(refusals.len(), 1);
    let refusal = refusals.remove(0);
    assert_eq!(refusal.event, machine.events.len() as u64 - 1);
    assert_eq!(refusal.stack, "train.py:9 main");
    let totals = machine.totals();
    let parts = refusal.parts;
    assert_eq!(
        parts.live_set + parts.pending + parts.fragmentation + parts.private_pools,
        totals.reserved_bytes
    );
    refusal
}

#[test]
fn refusals_have_one_cause_each() {
    let gib = 1 << 30;
    let filled = |mib: u64| {
        let mut machine = Machine::new();
        let stack = machine.stack(&["a.py:1 f"]);
        machine.malloc(mib * MIB, 0, stack);
        (machine, stack)
    };
    // 3 GiB live of 4, and 2 more wanted.
    let (mut machine, _) = filled(3072);
    let refusal = refused(&mut machine, 2 * gib, gib / 2, Some(4 * gib));
    assert_eq!(refusal.cause, Cause::LiveSet);
    assert_eq!(refusal.parts.non_torch, Some(Bytes(gib / 2)));

    // The same, on a device that is not known: others may hold most of it.
    let (mut machine, _) = filled(3072);
    let refusal = refused(&mut machine, 2 * gib, gib / 2, None);
    assert_eq!(refusal.cause, Cause::LiveSetOrNonTorch);
    let end = "in no block; what others hold is not known without the device's memory";
    assert!(refusal.summary.ends_with(end), "{}", refusal.summary);

    // It would have the room, were not half a GiB of it held by this process' context or by others.
    let (mut machine, _) = filled(3072);
    let refusal = refused(&mut machine, 3 * gib / 4, gib / 2, Some(4 * gib));
    assert_eq!(refusal.cause, Cause::LiveSetOrNonTorch);
    let end = "; 512.0 MiB are held outside PyTorch, by this process' context or by others";
    assert!(refusal.summary.ends_with(end), "{}", refusal.summary);

    // The same, on a device of 8 GiB of which others hold 4.5.
    let (mut machine, _) = filled(3072);
    let refusal = refused(&mut machine, 2 * gib, gib / 2, Some(8 * gib));
    assert_eq!(refusal.cause, Cause::NonTorch);
    assert_eq!(refusal.parts.non_torch, Some(Bytes(9 * gib / 2)));

    // The driver had 5 GiB: something else refused.
    let (mut machine, _) = filled(3072);
    let refusal = refused(&mut machine, 2 * gib, 5 * gib, None);
    assert_eq!(
        (refusal.cause, refusal.parts.cap),
        (Cause::Cap, Bytes(5 * gib))
    );
    assert_eq!(refusal.parts.non_torch, None);

    // Gaps of 16 MiB in ten segments, and 100 MiB wanted.
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 f"]);
    let segments: Vec<[u64; 2]> = (0..10)
        .map(|_| {
            let gap = [8, 8].map(|mib| machine.malloc(mib * MIB, 0, stack));
            machine.malloc(4 * MIB, 0, stack);
            gap
        })
        .collect();
    for block in segments.into_iter().flatten() {
        machine.free(block, false);
    }
    let refusal = refused(&mut machine, 100 * MIB, 0, None);
    assert_eq!(refusal.cause, Cause::Fragmentation);
    assert!(refusal.largest_gap_bytes < Bytes(100 * MIB));
    assert!(refusal.parts.fragmentation >= Bytes(100 * MIB));

    // A block that waits for another stream is as large as what is wanted.
    let (mut machine, stack) = filled(3072);
    let block = machine.malloc(600 * MIB, 0, stack);
    machine.free(block, true);
    let refusal = refused(&mut machine, 512 * MIB, 0, None);
    assert_eq!(
        (refusal.cause, refusal.parts.pending),
        (Cause::Pending, Bytes(600 * MIB))
    );
}

#[test]
fn a_block_that_comes_free_during_the_refusal_was_pending() {
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 f"]);
    let whole = machine.malloc(600 * MIB, 0, stack);
    machine.free(whole, false);
    machine.malloc(60 * MIB, 0, stack);
    let waits = machine.malloc(540 * MIB, 0, stack);
    machine.free(waits, true);
    machine.malloc(40 * MIB, 0, stack);
    machine.complete(waits);
    let refusal = refused(&mut machine, 512 * MIB, 0, None);
    assert_eq!(
        (
            refusal.cause,
            refusal.parts.pending,
            refusal.parts.fragmentation
        ),
        (Cause::Pending, Bytes(540 * MIB), Bytes::ZERO)
    );
}

/// The fragmentation found where `need` MiB are refused with nothing free. `other` MiB are held throughout; of
/// the rest, 160 of 200 MiB were freed since the peak but are pinned by survivors, or 100 of 300 in segments
/// that stay half used.
fn fragmentation_at_a_refusal(pins: bool, other: u64, need: u64) -> crate::explain::Fragmentation {
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 f"]);
    machine.malloc(other * MIB, 0, stack);
    let mut take = |mib: u64| machine.malloc(mib * MIB, 0, stack);
    let inactive = if pins {
        let blocks: Vec<[u64; 3]> = (0..10).map(|_| [take(8), take(4), take(8)]).collect();
        for [before, _, after] in blocks {
            machine.free(before, false);
            machine.free(after, false);
        }
        160
    } else {
        let blocks: Vec<u64> = (0..5).map(|_| take(60)).collect();
        for block in blocks {
            machine.free(block, false);
        }
        for _ in 0..5 {
            machine.malloc(40 * MIB, 0, stack);
        }
        100
    };
    machine.record(Action::OutOfMemory, 0, need * MIB, stack);
    let device = machine.explained(0);
    let found = device.fragmentation;
    assert!(device.peak.event < Some(device.oom[0].event));
    assert_eq!(found.refusal_event, Some(device.oom[0].event));
    assert_eq!(found.inactive_bytes, Bytes(inactive * MIB));
    assert_eq!(
        device.oom[0].cause == Cause::Fragmentation,
        found.verdict == Verdict::Fragmented
    );
    found
}

/// The peak, where all blocks were held, says nothing of a refusal after it.
#[test]
fn fragmentation_is_judged_where_a_request_was_refused_and_as_its_cause() {
    for (pins, other, need, verdict, said) in [
        (
            true,
            100,
            90,
            Verdict::Fragmented,
            "fragmentation is why 90.0 MiB were refused: 160.0 MiB of 300.0 MiB reserved are in no block; \
             blocks of 40.0 MiB in all keep 160.0 MiB in 10 segments from going back",
        ),
        (
            false,
            100,
            90,
            Verdict::Fragmented,
            "fragmentation is why 90.0 MiB were refused: 100.0 MiB of 400.0 MiB reserved are in no block",
        ),
        (
            true,
            100,
            700,
            Verdict::NotTheCause,
            "fragmentation is not why 700.0 MiB were refused: 160.0 MiB of 300.0 MiB reserved are in no block",
        ),
        (
            true,
            5_920,
            700,
            Verdict::Negligible,
            "fragmentation is not why 700.0 MiB were refused: 160.0 MiB of 5.98 GiB reserved are in no block",
        ),
    ] {
        let found = fragmentation_at_a_refusal(pins, other, need);
        let event = format!(" at event {}", found.refusal_event.unwrap());
        let summary = found.summary.replace(&event, "");
        assert_eq!((found.verdict, summary.as_str()), (verdict, said));
    }
}

/// A graph's pool of six blocks that are free between its replays, and 4 GiB of tensors; older versions do not
/// name the pool of an event.
fn with_a_graph(hides_pools: bool) -> (Machine, StackIndex) {
    let mut machine = Machine::new();
    machine.hides_pools = hides_pools;
    let stack = machine.stack(&["runner.py:1 run"]);
    machine.pool = machine.snapshot.pools.index_of((0, 1)).unwrap();
    let blocks: Vec<u64> = (0..6)
        .map(|_| machine.malloc(500 * MIB, 0, stack))
        .collect();
    for block in blocks {
        machine.free(block, false);
    }
    machine.pool = crate::snapshot::PoolIndex::DEFAULT;
    for _ in 0..8 {
        machine.malloc(512 * MIB, 0, stack);
    }
    (machine, stack)
}

#[test]
fn a_private_pool_is_named_and_neither_cache_nor_fragmentation() {
    const NAMED: &str = "; 2.93 GiB are in the private pool (0, 1): neither usable nor releasable";
    for hides_pools in [false, true] {
        let (machine, _) = with_a_graph(hides_pools);
        let device = machine.explained(0);
        let found = &device.fragmentation;
        assert_eq!(found.verdict, Verdict::Negligible);
        assert_eq!(found.releasable_bytes, Bytes::ZERO);
        assert_eq!(found.private_pools[0].inactive_bytes, Bytes(3000 * MIB));
        assert!(found.summary.ends_with(NAMED), "{}", found.summary);
        assert_eq!(device.end.releasable_bytes, Bytes::ZERO);
        assert_eq!(device.end.stuck_bytes, Bytes::ZERO);
        assert_eq!(device.end.private_pools, found.private_pools);

        // Without the pool's bytes the request does not fit; with them it would.
        let (mut machine, _) = with_a_graph(hides_pools);
        let refusal = refused(&mut machine, 700 * MIB, 584 * MIB, Some(8 << 30));
        assert_eq!(refusal.cause, Cause::PrivatePools);
        assert_eq!(refusal.parts.private_pools, Bytes(3000 * MIB));
        assert_eq!(refusal.parts.fragmentation, Bytes::ZERO);
        assert_eq!(refusal.largest_gap_bytes, Bytes::ZERO);
        assert_eq!(
            refusal.summary,
            format!(
                "tensors hold 4.00 GiB, and 700.0 MiB more are not there: 584.0 MiB are free on the device \
                 and 0 B in no block outside private pools{NAMED}"
            )
        );

        // More than even those: what is alive is too much.
        let (mut machine, _) = with_a_graph(hides_pools);
        let refusal = refused(&mut machine, 5 << 30, 584 * MIB, Some(8 << 30));
        assert_eq!(refusal.cause, Cause::LiveSet);
        assert!(refusal.summary.ends_with(NAMED), "{}", refusal.summary);
    }
}

/// A gap that is large enough was passed over: the request is of a pool that older versions do not name.
#[test]
fn a_request_that_passes_a_gap_over_is_not_refused_for_fragmentation() {
    for (hides_pools, cause) in [(true, Cause::Cap), (false, Cause::Fragmentation)] {
        let (mut machine, stack) = with_a_graph(hides_pools);
        let whole = machine.malloc(60 * MIB, 0, stack);
        machine.free(whole, false);
        machine.malloc(20 * MIB, 0, stack);
        let refusal = refused(&mut machine, 30 * MIB, 8 << 30, None);
        assert_eq!(refusal.largest_gap_bytes, Bytes(40 * MIB));
        assert_eq!(refusal.cause, cause);
    }
}

/// What is asked for during a capture may be served from the pool of the capture, and from no other.
#[test]
fn a_request_of_a_private_pool_has_its_own_pool() {
    let (mut machine, stack) = with_a_graph(false);
    machine.pool = machine.snapshot.pools.index_of((0, 1)).unwrap();
    let refusal = refused(&mut machine, 700 * MIB, 0, None);
    assert_eq!(refusal.cause, Cause::Fragmentation);
    assert_eq!(refusal.parts.private_pools, Bytes::ZERO);
    assert_eq!(refusal.largest_gap_bytes, Bytes(500 * MIB));

    let (mut machine, _) = with_a_graph(false);
    machine.pool = machine.snapshot.pools.index_of((0, 2)).unwrap();
    machine.malloc(20 * MIB, 0, stack);
    let refusal = refused(&mut machine, 700 * MIB, 0, None);
    assert_eq!(refusal.cause, Cause::PrivatePools);
    assert_eq!(refusal.parts.private_pools, Bytes(3000 * MIB));
}
