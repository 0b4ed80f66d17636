//! Traces on the simulator: what was recorded is predicted, and the outcome is what the real allocator counted.

use std::path::{Path, PathBuf};

use memfit_engine::allocator::replay::{self, Outcome};
use memfit_engine::allocator::{AddressOrder, Device, FreeOrder, Settings};
use memfit_engine::snapshot::{
    self, Action, Block, BlockState, DeviceRecord, Event, PoolIndex, Segment, Snapshot, StackIndex,
    TextIndex,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots")
}

fn read(path: &Path) -> Snapshot {
    snapshot::read_bytes(&std::fs::read(path).unwrap()).unwrap()
}

fn snapshots_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "pickle"))
        .collect();
    paths.sort();
    paths
}

/// Everything in a folder of snapshots must be predicted, one JSON line a device.
#[expect(clippy::print_stdout, reason = "the benchmark reads these lines")]
fn check_all(folder: &Path) -> u64 {
    let mut allocations = 0;
    for path in snapshots_in(folder) {
        let snapshot = read(&path);
        for device in &snapshot.devices {
            let report = replay::check(&snapshot, device);
            let count = |count: replay::Count| format!("[{}, {}]", count.matched, count.total);
            println!(
                "{{\"snapshot\": \"{}\", \"order\": \"{:?}\", \"allocations\": {}, \"segments\": {}, \
                 \"released\": {}, \"final_segments\": {}}}",
                path.file_name().unwrap().display(),
                report.order,
                count(report.allocations),
                count(report.segments),
                count(report.released),
                count(report.final_segments)
            );
            assert!(report.is_exact(), "{}: {report:?}", path.display());
            allocations += report.allocations.total;
        }
    }
    allocations
}

#[test]
fn every_fixture_is_predicted_exactly() {
    assert!(check_all(&fixtures()) > 300);
}

#[test]
#[ignore = "needs a folder of snapshots in MEMFIT_SNAPSHOTS"]
fn every_snapshot_of_a_folder_is_predicted_exactly() {
    let folder = std::env::var_os("MEMFIT_SNAPSHOTS").expect("MEMFIT_SNAPSHOTS names a folder");
    assert!(check_all(Path::new(&folder)) > 0);
}

fn under(name: &str, settings: &str, device: Device) -> Outcome {
    let snapshot = read(&fixtures().join(name).with_extension("pickle"));
    let settings = Settings::parse(settings).unwrap();
    let record = &snapshot.devices[0];
    replay::under(&snapshot, record, &settings, FreeOrder::default(), device)
}

#[test]
fn the_recorded_settings_give_what_the_allocator_counted() {
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (name, truth) in expected.as_object().unwrap() {
        let mut device = Device {
            address_order: AddressOrder::Descending,
            ..Device::new(truth["total_bytes"].as_u64().unwrap())
        };
        let mut settings = truth["settings"].as_str().unwrap().to_owned();
        match name.as_str() {
            "oom_other_process" => device.other_bytes = 280 * MIB,
            "oom_cap" => settings.push_str("per_process_memory_fraction:0.4"),
            _ => {}
        }
        let outcome = under(name, &settings, device);
        let error = outcome.oom.map(|refusal| refusal.error.to_string());
        assert_eq!(error.as_deref(), truth["errors"][0].as_str(), "{name}");
        if error.is_none() {
            let peak = |which: &str| truth["peak"][which].as_u64().unwrap();
            assert_eq!(
                outcome.peak_allocated_bytes,
                peak("allocated_bytes"),
                "{name}"
            );
            assert_eq!(outcome.peak_active_bytes, peak("active_bytes"), "{name}");
            assert_eq!(
                outcome.peak_reserved_bytes,
                peak("reserved_bytes"),
                "{name}"
            );
            let retries = truth["num_alloc_retries"].as_u64().unwrap();
            assert_eq!(outcome.num_alloc_retries, retries, "{name}");
        }
    }
}

#[test]
fn expandable_segments_avoid_an_error_of_fragmentation_alone() {
    let device = Device::new(512 * MIB);
    let before = under("oom_fragmentation", "", device);
    assert!(before.oom.is_some());
    let after = under("oom_fragmentation", "expandable_segments:True", device);
    assert_eq!((after.oom, after.ooms_avoided), (None, 1));
    let roomier = Device::new(1024 * MIB);
    assert_eq!(under("oom_fragmentation", "", roomier).oom, None);

    let live = under(
        "oom_live_set",
        "expandable_segments:True",
        Device::new(280 * MIB),
    );
    assert!(live.oom.is_some());
}

/// Any events over any segments, contradictions included.
fn nonsense() -> impl Strategy<Value = Snapshot> {
    let address = prop_oneof![
        (0..64_u64).prop_map(|page| 0x1000_0000 + page * 0x10_0000),
        Just(0),
        Just(u64::MAX - 512),
        any::<u64>(),
    ];
    let size = prop_oneof![
        Just(2 * MIB),
        Just(20 * MIB),
        0..64 * MIB,
        Just(0),
        any::<u64>()
    ];
    let action = prop::sample::select(vec![
        Action::Alloc,
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::OutOfMemory,
    ]);
    let event = (action, address.clone(), size.clone(), 0..3_u64, 0..2_u16);
    let state = prop::sample::select(vec![
        BlockState::Allocated,
        BlockState::AwaitingFree,
        BlockState::Inactive,
    ]);
    let block = (address.clone(), size.clone(), state);
    let segment = (
        address,
        size,
        any::<[bool; 2]>(),
        prop::collection::vec(block, 0..4),
    );
    (
        prop::collection::vec(event, 0..80),
        prop::collection::vec(segment, 0..5),
    )
        .prop_map(|(events, segments)| {
            let mut snapshot = Snapshot::default();
            let pool = snapshot.pools.index_of((0, 1)).unwrap();
            let mut record = DeviceRecord::default();
            for (action, address, size, stream, number) in events {
                let event = Event {
                    action,
                    address,
                    size,
                    stream,
                    time_us: 0,
                    stack: StackIndex::NONE,
                    pool: if number == 0 {
                        PoolIndex::DEFAULT
                    } else {
                        pool
                    },
                    label: TextIndex::default(),
                };
                record.events.push(event).unwrap();
            }
            record.segments = segments
                .into_iter()
                .map(
                    |(address, total_size, [is_small, is_expandable], blocks)| Segment {
                        address,
                        total_size,
                        stream: 0,
                        is_small,
                        is_expandable,
                        pool: PoolIndex::DEFAULT,
                        stack: StackIndex::NONE,
                        blocks: blocks
                            .into_iter()
                            .map(|(address, size, state)| Block {
                                address,
                                size,
                                requested_size: size,
                                state,
                                stack: StackIndex::NONE,
                            })
                            .collect(),
                    },
                )
                .collect();
            snapshot.devices.push(record);
            snapshot
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn contradictions_neither_panic_nor_hang(snapshot in nonsense(), expandable in any::<bool>()) {
        let record = &snapshot.devices[0];
        let _ = replay::check(&snapshot, record);
        let settings = Settings { expandable_segments: expandable, ..Settings::default() };
        for total_bytes in [0, 64 * MIB, u64::MAX] {
            let device = Device::new(total_bytes);
            let _ = replay::under(&snapshot, record, &settings, FreeOrder::default(), device);
        }
    }
}
