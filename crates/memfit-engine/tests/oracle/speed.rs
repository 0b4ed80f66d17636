//! How fast the simulator is, beside the real allocator on the same operations.
//!
//! Prints one JSON line a case; `benchmarks/allocator.py` runs it and keeps the result.

use memfit_engine::allocator::{BlockId, Device, FreeOrder, Settings, Simulator};

use crate::random::Random;
use crate::real::oracle_or_skip;
use crate::script::{Operation, script};

const OPERATIONS: usize = 2_000_000;

#[test]
#[ignore = "measures, and needs a release build to mean anything"]
fn speed() {
    let Some(oracle) = oracle_or_skip() else {
        return;
    };
    for (name, settings, streams) in [
        ("default", "", 1),
        ("default, 3 streams", "", 3),
        ("expandable", "expandable_segments:True", 1),
        ("split limit", "max_split_size_mb:64", 1),
        ("divisions", "roundup_power2_divisions:8", 1),
    ] {
        let operations = workload(streams);
        let device = Device::new(64 << 30);
        let (real_seconds, allocated, reserved) =
            oracle.time(settings, device, &script(&operations));
        let (seconds, simulator) = simulate(settings, device, &operations);
        let statistics = simulator.statistics();
        assert_eq!(statistics.allocated_bytes.all.peak, allocated);
        assert_eq!(statistics.reserved_bytes.all.peak, reserved);
        println!(
            "{{\"case\": \"{name}\", \"operations\": {OPERATIONS}, \"real_cpu_seconds\": {real_seconds:.3}, \
             \"simulator_cpu_seconds\": {seconds:.3}, \"peak_reserved_bytes\": {reserved}}}"
        );
    }
}

/// Between 200 and 800 live blocks of 512 bytes to 32 MiB.
fn workload(streams: u64) -> Vec<Operation> {
    let mut random = Random(7);
    let mut live: Vec<usize> = Vec::new();
    let mut free: Vec<usize> = (0..800).collect();
    let mut operations = Vec::with_capacity(OPERATIONS);
    for _ in 0..OPERATIONS {
        let allocates = live.len() < 200 || (live.len() < 800 && random.one_in(2));
        if allocates {
            let magnitude = 1 << (9 + random.below(16));
            let slot = free.pop().unwrap();
            live.push(slot);
            operations.push(Operation::Malloc {
                slot,
                bytes: magnitude + random.below(magnitude),
                stream: random.below(streams) * 0x60,
            });
        } else {
            let place = usize::try_from(random.below(live.len() as u64)).unwrap();
            let slot = live.swap_remove(place);
            free.push(slot);
            operations.push(Operation::Free { slot });
        }
    }
    operations
}

fn simulate(settings: &str, device: Device, operations: &[Operation]) -> (f64, Simulator) {
    let settings = Settings::parse(settings).unwrap();
    let mut simulator = Simulator::new(&settings, FreeOrder::default(), device);
    let mut slots: Vec<Option<BlockId>> = vec![None; 800];
    let start = cpu_seconds();
    for operation in operations {
        match *operation {
            Operation::Malloc {
                slot,
                bytes,
                stream,
            } => slots[slot] = simulator.malloc(bytes, stream).ok(),
            Operation::Free { slot } => simulator.free(slots[slot].take().unwrap()),
            _ => unreachable!("the workload has nothing else"),
        }
    }
    (cpu_seconds() - start, simulator)
}

/// Processor time of this thread.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanoseconds: u64 = text.split_whitespace().next().unwrap().parse().unwrap();
    std::time::Duration::from_nanos(nanoseconds).as_secs_f64()
}
