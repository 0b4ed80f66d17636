//! Small streams of operations that once showed a difference, or that random ones do not reach.

use memfit_engine::allocator::Device;

use crate::differential::difference;
use crate::real::oracle_or_skip;
use crate::script::Operation::{self, *};

const MIB: u64 = 1 << 20;

fn same(settings: &str, total_bytes: u64, operations: &[Operation]) {
    let Some(oracle) = oracle_or_skip() else {
        return;
    };
    let mut operations = operations.to_vec();
    operations.extend([Statistics, Segments, Trace]);
    let found = difference(oracle, settings, Device::new(total_bytes), &operations);
    assert_eq!(found, None);
}

fn malloc(slot: usize, bytes: u64) -> Operation {
    Malloc {
        slot,
        bytes,
        stream: 0,
    }
}

/// The block of an event that completes during the last attempt is free, and yet the request fails.
#[test]
fn a_block_freed_by_the_last_attempt_is_not_found() {
    let operations = [
        EventsReady(false),
        malloc(0, 600 * MIB),
        malloc(1, 100 * MIB),
        RecordStream {
            slot: 0,
            stream: 0x60,
        },
        RecordStream {
            slot: 1,
            stream: 0x60,
        },
        Free { slot: 0 },
        Free { slot: 1 },
        malloc(2, 50 * MIB),
        malloc(3, 560 * MIB),
        malloc(3, 560 * MIB),
    ];
    same("", 768 * MIB, &operations);
    same("max_split_size_mb:64", 768 * MIB, &operations);
    same("expandable_segments:True", 768 * MIB, &operations);
}

#[test]
fn frees_during_a_capture_wait_for_its_end() {
    for settings in ["", "expandable_segments:True"] {
        same(
            settings,
            512 * MIB,
            &[
                malloc(0, 30 * MIB),
                RecordStream {
                    slot: 0,
                    stream: 0xc0,
                },
                Begin {
                    pool: 1,
                    stream: None,
                },
                Capture(true),
                malloc(1, 20 * MIB),
                malloc(2, 4000),
                RecordStream {
                    slot: 1,
                    stream: 0x60,
                },
                RecordStream {
                    slot: 0,
                    stream: 0x60,
                },
                Free { slot: 0 },
                Free { slot: 1 },
                Free { slot: 2 },
                malloc(3, 20 * MIB),
                Segments,
                Capture(false),
                End { pool: 1 },
                malloc(4, 30 * MIB),
                Segments,
            ],
        );
    }
}

#[test]
fn no_memory_is_given_back_during_a_capture() {
    same(
        "",
        256 * MIB,
        &[
            malloc(0, 200 * MIB),
            Free { slot: 0 },
            Begin {
                pool: 1,
                stream: None,
            },
            Capture(true),
            malloc(1, 100 * MIB),
            Capture(false),
            malloc(1, 100 * MIB),
            End { pool: 1 },
            Release { pool: 1 },
            EmptyCache { pool: 1 },
            Free { slot: 1 },
            EmptyCache { pool: 1 },
        ],
    );
}

#[test]
fn a_reserve_smaller_than_the_request_is_named() {
    same(
        "expandable_segments:True,expandable_segments_reserve:0.1",
        1024 * MIB,
        &[
            malloc(0, 200 * MIB),
            malloc(1, 50 * MIB),
            malloc(2, 50 * MIB),
            malloc(3, 50 * MIB),
        ],
    );
}

/// The rejection tells the bytes asked for, not rounded.
#[test]
fn a_rejection_names_the_request() {
    same(
        "throw_on_cudamalloc_oom:True",
        20 * MIB,
        &[malloc(0, 20 * MIB), malloc(1, 1), malloc(1, 2_097_153)],
    );
}
