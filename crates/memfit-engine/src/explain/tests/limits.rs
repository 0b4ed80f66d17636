//! Settings that count only below a limit of the process.

use super::*;

/// Buffers that grow: each leaves a segment behind that no later one can use.
fn growing() -> Machine {
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 f"]);
    for mib in [100, 150, 200, 250] {
        let buffer = machine.malloc(mib * MIB, 0, stack);
        machine.free(buffer, false);
    }
    machine
}

fn replayed(machine: &Machine, device_memory: Option<u64>) -> DeviceExplanation {
    let request = Request {
        device_memory: device_memory.map(Bytes),
        ..Request::default()
    };
    let mut explanation = explain(&machine.snapshot(0), &request);
    explanation.devices.remove(0)
}

/// The peak with garbage collection, if it was tried.
fn collected(device: &DeviceExplanation) -> Option<Bytes> {
    let text = "garbage_collection_threshold:0.6";
    let mut tried = device.counterfactuals.iter();
    let found = tried.find(|it| it.settings.ends_with(text));
    found.map(|it| it.peak_reserved_bytes)
}

#[test]
fn garbage_collection_is_tried_where_the_limit_is_known() {
    let mut machine = growing();
    assert_eq!(collected(&replayed(&machine, Some(2000 * MIB))), None);
    let settings = ("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5");
    let settings = (settings.0.to_owned(), settings.1.to_owned());
    machine.snapshot.settings.push(settings);
    assert_eq!(collected(&replayed(&machine, None)), None);

    // Before the last buffer 450 MiB are held: less than 60 % of 1000, more than of 720. Then the older two go.
    for (limit, peak) in [(1000, 700), (720, 450)] {
        let device = replayed(&machine, Some(2 * limit * MIB));
        assert_eq!(device.replayed_reserved_bytes, Some(Bytes(700 * MIB)));
        assert_eq!(collected(&device), Some(Bytes(peak * MIB)), "{limit}");
    }
}

/// A limit that refused is known by that, at least what was held.
#[test]
fn garbage_collection_is_tried_where_a_limit_refused() {
    let mut machine = growing();
    let stack = machine.stack(&["a.py:2 g"]);
    machine.empty_cache();
    machine.malloc(700 * MIB, 0, stack);
    machine.record(Action::OutOfMemory, 8 << 30, 100 * MIB, stack);
    let device = replayed(&machine, None);
    assert_eq!(device.oom[0].cause, Cause::Cap);
    assert!(collected(&device).is_some());
    let found = device.counterfactuals.iter();
    assert!(found.map(|it| it.oom_avoided).all(|it| it == Some(false)));
}
