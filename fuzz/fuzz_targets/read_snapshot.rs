//! Any bytes as a memory snapshot: an error or a snapshot whose indices hold, never a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memfit_engine::snapshot::{ReadOptions, Snapshot, read};

/// Floods end early, so that a run stays below the fuzzer's own limit of memory.
const MEMORY_LIMIT_BYTES: u64 = 64 << 20;

fuzz_target!(|data: &[u8]| {
    let options = ReadOptions { memory_limit_bytes: MEMORY_LIMIT_BYTES, ..ReadOptions::default() };
    if let Ok(snapshot) = read(data, options) {
        touch(&snapshot);
    }
});

/// Every index leads somewhere, and blocks lie in their segments in order.
fn touch(snapshot: &Snapshot) {
    for device in &snapshot.devices {
        for event in device.events.iter() {
            let _pool = snapshot.pools.id(event.pool);
            let _label = snapshot.texts.get(event.label);
            for frame in snapshot.stacks.get(event.stack) {
                let _names = (snapshot.texts.get(frame.file), snapshot.texts.get(frame.function));
            }
        }
        for segment in &device.segments {
            let mut end = segment.address;
            for block in &segment.blocks {
                assert!(block.address >= end);
                end = block.address + block.size;
                let _frames = snapshot.stacks.get(block.stack);
            }
            assert!(end <= segment.address + segment.total_size);
        }
    }
    assert!(snapshot.problems.len() <= 101);
}
