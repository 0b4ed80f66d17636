//! One program, recorded under some settings and replayed under others, against the real allocator that runs it
//! under those others.

use memfit_engine::allocator::replay;
use memfit_engine::allocator::{BlockLayout, Device, FreeOrder, Settings, Simulator};
use memfit_engine::snapshot::{
    Block, DeviceRecord, Event, PoolIndex, Segment, Snapshot, StackIndex, TextIndex,
};

use crate::random::{self, Mix};
use crate::real::oracle_or_skip;
use crate::script::{Operation, script};

const MIB: u64 = 1 << 20;

const MIX: Mix = Mix {
    live_bytes: 700 * MIB,
    largest_bytes: 200 * MIB,
    streams: &[0, 0x60],
    has_events: false,
    has_pools: false,
    releases_pools: false,
    has_pressure: false,
    settings: &[],
};

#[test]
fn other_settings_have_the_outcome_of_the_real_allocator() {
    let Some(oracle) = oracle_or_skip() else {
        return;
    };
    let (mut served, mut refused) = (0, 0);
    for seed in 0..2 {
        let program: Vec<Operation> = random::operations(seed, 1_500, MIX)
            .into_iter()
            .filter(|operation| {
                matches!(operation, Operation::Malloc { .. } | Operation::Free { .. })
            })
            .collect();
        let recorded = ["", "expandable_segments:True"][usize::try_from(seed % 2).unwrap()];
        let snapshot = record(&program, recorded);
        for settings in [
            "",
            "expandable_segments:True",
            "max_split_size_mb:40",
            "roundup_power2_divisions:4",
            "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
            "large_segment_size_mb:64",
        ] {
            for total_bytes in [700 * MIB, 1100 * MIB, 4096 * MIB] {
                let device = Device::new(total_bytes);
                let outcome = replay::under(
                    &snapshot,
                    &snapshot.devices[0],
                    &Settings::parse(settings).unwrap(),
                    FreeOrder::default(),
                    device,
                );
                // The real one, up to its first refusal.
                let mut kept = program.clone();
                kept.push(Operation::Statistics);
                let mut answer = oracle.run(settings, device, &script(&kept));
                if let Some(place) = first_refusal(&program, &answer) {
                    kept.truncate(place + 1);
                    kept.push(Operation::Statistics);
                    answer = oracle.run(settings, device, &script(&kept));
                }
                let error = answer.lines().find(|line| line.starts_with("CUDA out"));
                let statistics = answer.lines().last().unwrap();
                let told = outcome.oom.map(|refusal| refusal.error.to_string());
                assert_eq!(told.as_deref(), error, "{settings}, {total_bytes}");
                let peaks = [
                    ("allocated_bytes", outcome.peak_allocated_bytes),
                    ("active_bytes", outcome.peak_active_bytes),
                    ("reserved_bytes", outcome.peak_reserved_bytes),
                ];
                for (name, peak) in peaks {
                    assert_eq!(
                        real_peak(statistics, name),
                        peak,
                        "{settings}, {total_bytes}"
                    );
                }
                let retries = format!(" retries {} ", outcome.num_alloc_retries);
                assert!(statistics.contains(&retries), "{settings}, {total_bytes}");
                if error.is_some() {
                    refused += 1;
                } else {
                    served += 1;
                }
            }
        }
    }
    assert!(
        served > 10 && refused > 10,
        "{served} served, {refused} refused"
    );
}

/// The place of the first request that was refused; every request has one line of the answer.
fn first_refusal(program: &[Operation], answer: &str) -> Option<usize> {
    let refused = answer
        .lines()
        .position(|line| line.starts_with("CUDA out"))?;
    let requests = program.iter().enumerate();
    let mut requests =
        requests.filter(|(_, operation)| matches!(operation, Operation::Malloc { .. }));
    requests.nth(refused).map(|(place, _)| place)
}

fn real_peak(statistics: &str, name: &str) -> u64 {
    let words: Vec<&str> = statistics.split(' ').collect();
    let place = words.iter().position(|&word| word == name).unwrap();
    words[place + 1].split('/').nth(1).unwrap().parse().unwrap()
}

/// The trace of a program from its start, on a device with room for everything.
fn record(program: &[Operation], settings: &str) -> Snapshot {
    let settings = Settings::parse(settings).unwrap();
    let mut simulator = Simulator::new(&settings, FreeOrder::default(), Device::new(64 << 30));
    simulator.record_trace(true);
    let mut slots = std::collections::BTreeMap::new();
    for operation in program {
        match *operation {
            Operation::Malloc {
                slot,
                bytes,
                stream,
            } => {
                slots.insert(slot, simulator.malloc(bytes, stream).unwrap());
            }
            Operation::Free { slot } => simulator.free(slots.remove(&slot).unwrap()),
            _ => unreachable!("the program has nothing else"),
        }
    }
    snapshot_of(&mut simulator, 0)
}

/// The simulator's state and its trace but for the first `forgotten` events, as a ring buffer leaves it.
fn snapshot_of(simulator: &mut Simulator, forgotten: usize) -> Snapshot {
    let block = |block: &BlockLayout| Block {
        address: block.address,
        size: block.size,
        requested_size: block.requested_size,
        state: block.state,
        stack: StackIndex::NONE,
    };
    let mut record = DeviceRecord::default();
    for event in simulator.take_trace().into_iter().skip(forgotten) {
        let event = Event {
            action: event.action,
            address: event.address,
            size: event.size,
            stream: event.stream,
            time_us: 0,
            stack: StackIndex::NONE,
            pool: PoolIndex::DEFAULT,
            label: TextIndex::default(),
        };
        record.events.push(event).unwrap();
    }
    record.segments = simulator
        .segments()
        .into_iter()
        .map(|segment| Segment {
            address: segment.address,
            total_size: segment.total_size,
            stream: segment.stream,
            is_small: segment.is_small,
            is_expandable: segment.is_expandable,
            pool: PoolIndex::DEFAULT,
            stack: StackIndex::NONE,
            blocks: segment.blocks.iter().map(block).collect(),
        })
        .collect();
    Snapshot {
        devices: vec![record],
        ..Snapshot::default()
    }
}

/// What a ring buffer forgot is rebuilt well enough to predict the rest; nothing forgotten, all of it.
#[test]
fn a_trace_without_its_beginning_is_predicted() {
    let mut total = replay::Count::default();
    for (seed, settings) in
        (10..).zip(["", "expandable_segments:True", "roundup_power2_divisions:4"])
    {
        let mut program = random::operations(seed, 3_000, MIX);
        // Some blocks are still in use at the end.
        program.truncate(3_000);
        for forgotten in [0, 1, 500, 2_001, 4_000] {
            let mut simulator = Simulator::new(
                &Settings::parse(settings).unwrap(),
                FreeOrder::default(),
                Device::new(64 << 30),
            );
            simulator.record_trace(true);
            let mut slots = std::collections::BTreeMap::new();
            for operation in &program {
                match *operation {
                    Operation::Malloc {
                        slot,
                        bytes,
                        stream,
                    } => {
                        slots.insert(slot, simulator.malloc(bytes, stream).unwrap());
                    }
                    Operation::Free { slot } => simulator.free(slots.remove(&slot).unwrap()),
                    _ => {}
                }
            }
            let mut snapshot = snapshot_of(&mut simulator, forgotten);
            let settings = ("PYTORCH_CUDA_ALLOC_CONF".to_owned(), settings.to_owned());
            snapshot.settings.push(settings);
            let report = replay::check(&snapshot, &snapshot.devices[0]);
            if forgotten == 0 {
                assert!(report.is_exact(), "{report:?}");
            }
            total.matched += report.allocations.matched;
            total.total += report.allocations.total;
        }
    }
    // 15,624 of 15,628: the sizes of blocks freed long ago, and which of two segments came first, are guesses.
    assert!(total.matched * 1000 >= total.total * 999, "{total:?}");
}
