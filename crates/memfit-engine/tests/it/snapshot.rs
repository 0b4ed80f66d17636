//! Pickles that nobody should write: read to an error or a snapshot, quickly, in bounded memory.

use std::io::Read;
use std::ops::ControlFlow;

use memfit_engine::snapshot::{Action, ReadOptions, Snapshot, SnapshotError, read, read_bytes};
use proptest::prelude::*;

/// A small whole snapshot of protocol 4: one segment of two blocks, three events, two frames.
fn small() -> Vec<u8> {
    let mut pickle = b"\x80\x04}(".to_vec();
    let text = |pickle: &mut Vec<u8>, text: &str| {
        pickle.extend([0x8c, u8::try_from(text.len()).expect("texts are short")]);
        pickle.extend(text.as_bytes());
    };
    text(&mut pickle, "segments");
    pickle.extend(b"](}(");
    for (key, value) in [
        ("device", &b"K\x00"[..]),
        ("address", b"J\x00\x00\x20\x00"),
        ("total_size", b"J\x00\x00\x20\x00"),
        ("stream", b"K\x00"),
        ("segment_pool_id", b"K\x00K\x00\x86"),
        ("is_expandable", b"\x89"),
    ] {
        text(&mut pickle, key);
        pickle.extend(value);
    }
    text(&mut pickle, "blocks");
    pickle.extend(b"](");
    for (address, state) in [(0x20_0000_i32, "active_allocated"), (0x30_0000, "inactive")] {
        pickle.extend(b"}(");
        text(&mut pickle, "address");
        pickle.push(b'J');
        pickle.extend(address.to_le_bytes());
        text(&mut pickle, "size");
        pickle.extend(b"J\x00\x00\x10\x00");
        text(&mut pickle, "state");
        text(&mut pickle, state);
        pickle.push(b'u');
    }
    pickle.extend(b"eue");
    text(&mut pickle, "device_traces");
    pickle.extend(b"](](");
    for action in ["alloc", "free_requested", "free_completed"] {
        pickle.extend(b"}(");
        for (key, value) in [
            ("addr", &b"\x8a\x04\x00\x00\x30\x00"[..]),
            ("size", b"M\x00\x02"),
        ] {
            text(&mut pickle, key);
            pickle.extend(value);
        }
        text(&mut pickle, "action");
        text(&mut pickle, action);
        text(&mut pickle, "frames");
        pickle.extend(b"](}(");
        text(&mut pickle, "filename");
        text(&mut pickle, "train.py");
        text(&mut pickle, "name");
        text(&mut pickle, "step");
        text(&mut pickle, "line");
        pickle.extend(b"K\x07u\x94eu");
    }
    pickle.extend(b"eeu.");
    pickle
}

/// What the types promise: every index leads somewhere, blocks lie in their segments in order.
fn holds(snapshot: &Snapshot) {
    for device in &snapshot.devices {
        for event in device.events.iter() {
            let _known = (
                snapshot.pools.id(event.pool),
                snapshot.texts.get(event.label),
            );
            for frame in snapshot.stacks.get(event.stack) {
                let _known = (
                    snapshot.texts.get(frame.file),
                    snapshot.texts.get(frame.function),
                );
            }
        }
        let mut free_from = 0;
        for segment in &device.segments {
            assert!(segment.address >= free_from);
            free_from = segment.address;
            for block in &segment.blocks {
                assert!(block.address >= free_from);
                free_from = block.address + block.size;
                let _known = snapshot.stacks.get(block.stack);
            }
            assert!(free_from <= segment.address + segment.total_size);
            free_from = segment.address + segment.total_size;
        }
    }
    assert!(snapshot.problems.len() <= 101);
}

#[test]
fn the_small_snapshot_reads_whole() {
    let snapshot = read_bytes(&small()).unwrap();
    assert_eq!(snapshot.problems, []);
    let device = &snapshot.devices[0];
    assert_eq!(device.segments[0].blocks.len(), 2);
    let actions: Vec<Action> = device.events.iter().map(|event| event.action).collect();
    let expected = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    assert_eq!(actions, expected);
    let stack = snapshot.stacks.get(device.events.get(2).unwrap().stack);
    assert_eq!(snapshot.texts.get(stack[0].file), "train.py");
    // Equal stacks of different lists are one.
    assert_eq!(snapshot.stacks.len(), 2);
}

#[test]
fn cut_off_anywhere_it_says_where() {
    let whole = small();
    for length in 1..whole.len() {
        match read_bytes(&whole[..length]) {
            Err(SnapshotError::Truncated { position }) => assert_eq!(position, length as u64),
            other => panic!("cut to {length} bytes: {other:?}"),
        }
    }
    assert!(matches!(read_bytes(b""), Err(SnapshotError::Empty)));
}

#[test]
fn every_byte_may_be_another() {
    let whole = small();
    let bytes = b"hjKMJ(}]uesaXGN.)tld2010CBqrcRbioQ\x80\x81\x8a\x8b\x8c\x8d\x8e\x85\x86\x87\x88\x8f\x90\x91\x93\x94\x95\x96\0\x01\x7f\xff";
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        for &byte in bytes {
            changed[at] = byte;
            if let Ok(snapshot) = read_bytes(&changed) {
                holds(&snapshot);
            }
        }
    }
}

#[test]
fn what_runs_code_is_refused_by_name() {
    for (code, name) in [
        (&b"cos\nsystem\n"[..], "`GLOBAL` of `os.system`"),
        (
            b"\x8c\x02os\x8c\x06system\x93",
            "`STACK_GLOBAL` of `os.system`",
        ),
        (b"(R", "`REDUCE`"),
        (b"b", "`BUILD`"),
        (b"(ios\nsystem\n", "`INST` of `os.system`"),
        (b"(o", "`OBJ`"),
        (b"\x81", "`NEWOBJ`"),
        (b"\x92", "`NEWOBJ_EX`"),
        (b"\x82\x01", "`EXT1`"),
        (b"\x83\x01\x00", "`EXT2`"),
        (b"\x84\x01\x00\x00\x00", "`EXT4`"),
        (b"P1\n", "`PERSID`"),
        (b"Q", "`BINPERSID`"),
        (b"\x97", "`NEXT_BUFFER`"),
        (b"\x98", "`READONLY_BUFFER`"),
    ] {
        let pickle = [b"\x80\x04", code, b"."].concat();
        let said = read_bytes(&pickle).unwrap_err().to_string();
        assert!(
            said.contains(name) && said.contains("nothing was imported"),
            "{said}"
        );
    }
    for code in [
        &b"I1\n"[..],
        b"L1L\n",
        b"F1\n",
        b"S''\n",
        b"T",
        b"U",
        b"V\n",
        b"g1\n",
        b"p1\n",
    ] {
        let pickle = [b"\x80\x02", code, b"."].concat();
        assert!(matches!(
            read_bytes(&pickle),
            Err(SnapshotError::OldProtocol { .. })
        ));
    }
    assert!(matches!(
        read_bytes(b"\x80\x06N."),
        Err(SnapshotError::NewProtocol { found: 6 })
    ));
}

/// `count` times the same bytes, without holding them.
fn repeated(start: &[u8], bytes: &'static [u8], count: u64) -> impl Read {
    let cycle = bytes.repeat(4096 / bytes.len());
    let length = count * bytes.len() as u64;
    std::io::Cursor::new(start.to_vec()).chain(Forever { cycle, at: 0 }.take(length))
}

struct Forever {
    cycle: Vec<u8>,
    at: usize,
}

impl Read for Forever {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let piece = &self.cycle[self.at..];
        let count = piece.len().min(out.len());
        out[..count].copy_from_slice(&piece[..count]);
        self.at = (self.at + count) % self.cycle.len();
        Ok(count)
    }
}

#[test]
fn floods_meet_the_limit_of_memory() {
    // 256 MiB of each would take gigabytes as values.
    let small = || ReadOptions {
        memory_limit_bytes: 4 << 20,
        ..ReadOptions::default()
    };
    for flood in [&b"N"[..], b"(", b"]", b"}", b"K\x01", b"]\x94", b"(]", b"2"] {
        let start: &[u8] = if flood == b"2" {
            b"\x80\x04N"
        } else {
            b"\x80\x04"
        };
        let source = repeated(start, flood, (256 << 20) / flood.len() as u64);
        let options = if flood == b"N" {
            ReadOptions::default()
        } else {
            small()
        };
        let error = read(source, options).unwrap_err();
        assert!(
            matches!(error, SnapshotError::TooLarge { .. }),
            "{flood:?}: {error}"
        );
    }
}

#[test]
fn declared_lengths_are_not_believed() {
    for huge in [
        &b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"[..],
        b"X\xff\xff\xff\xff",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\xff",
        b"B\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\xff",
        b"]r\xff\xff\xff\xff",
    ] {
        let pickle = [b"\x80\x04", huge, b"short"].concat();
        let error = read_bytes(&pickle).unwrap_err();
        assert!(
            matches!(
                error,
                SnapshotError::Truncated { .. }
                    | SnapshotError::TooLarge { .. }
                    | SnapshotError::Damaged { .. }
            ),
            "{huge:?}: {error}"
        );
    }
}

#[test]
fn sharing_and_cycles_multiply_nothing() {
    // l = []; then each list holds the one before a hundred times: 100^60 elements if expanded.
    let mut pickle = b"\x80\x04]\x94".to_vec();
    for level in 0..60 {
        pickle.extend(b"0]\x94(");
        pickle.extend([b'h', level].repeat(100));
        pickle.push(b'e');
    }
    pickle.push(b'.');
    let said = read_bytes(&pickle).unwrap_err().to_string();
    assert!(said.contains("a list of 100 things"), "{said}");
    // A list in itself, a dict in itself.
    let said = read_bytes(b"\x80\x04]\x94(h\0h\0e.")
        .unwrap_err()
        .to_string();
    assert!(said.contains("a list of 2 things"), "{said}");
    let said = read_bytes(b"\x80\x04}\x94(\x8c\x08segmentsh\0u.").unwrap();
    assert_eq!(said.problems.len(), 1);
}

#[test]
fn one_large_stack_used_often_is_looked_at_once() {
    // 100,000 frames in one list, which 100,000 events share.
    let mut pickle = b"\x80\x04}\x8c\x08filename\x94\x8c\x01fs\x94]\x94(".to_vec();
    pickle.extend(b"h\x01".repeat(100_000));
    pickle.extend(b"e0\x8c\x06frames\x940\x8c\x06action\x940\x8c\x05alloc\x940");
    pickle.extend(b"0}\x8c\x0ddevice_traces](](");
    pickle.extend(b"}(h\x04h\x05h\x03h\x02u".repeat(100_000));
    pickle.extend(b"ees.");
    let snapshot = read_bytes(&pickle).unwrap();
    assert_eq!(snapshot.devices[0].events.len(), 100_000);
    assert_eq!(snapshot.problems.len(), 101);
}

#[test]
fn a_list_changed_after_use_is_damage() {
    // A stack in an event, then a frame more in the stack.
    let mut pickle = b"\x80\x04}\x8c\x08filename\x8c\x01fs\x94]\x94(h\x00e".to_vec();
    pickle.extend(b"}(\x8c\x06framesh\x01u0(h\x00e.");
    assert!(matches!(
        read_bytes(&pickle),
        Err(SnapshotError::Damaged { .. })
    ));
}

#[test]
fn events_written_all_at_once_are_taken_in_one_by_one() {
    // torch's own pickler does not write in batches.
    let mut pickle =
        b"\x80\x02}\x8c\x06action\x94\x8c\x08snapshot\x94s0}\x8c\x0ddevice_traces](](".to_vec();
    pickle.extend(b"}(h\x00h\x01u".repeat(500_000));
    pickle.extend(b"ees.");
    let limit = ReadOptions {
        memory_limit_bytes: 48 << 20,
        ..ReadOptions::default()
    };
    let snapshot = read(&pickle[..], limit).unwrap();
    assert_eq!(snapshot.devices[0].events.len(), 500_000);
    assert_eq!(snapshot.problems, []);
}

#[test]
fn the_watcher_can_end_it() {
    let mut seen = Vec::new();
    let mut watch = |position| {
        seen.push(position);
        if seen.len() < 3 {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    let options = ReadOptions {
        watch: Some(&mut watch),
        ..ReadOptions::default()
    };
    let error = read(repeated(b"\x80\x04", b"N0", 1 << 30), options).unwrap_err();
    assert!(matches!(error, SnapshotError::Stopped { .. }));
    assert!(seen.is_sorted() && seen.len() == 3);
}

/// Opcodes of data with short arguments, in any order.
fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let key = prop::sample::select(vec![
        "action",
        "alloc",
        "free_completed",
        "addr",
        "size",
        "frames",
        "filename",
        "name",
        "line",
        "segments",
        "device_traces",
        "blocks",
        "state",
        "inactive",
        "total_size",
        "address",
        "pool_id",
        "external_annotations",
        "allocator_settings",
        "device",
        "history",
    ]);
    let text = key.prop_map(|key| {
        let length = u8::try_from(key.len()).expect("keys are short");
        [&[0x8c, length], key.as_bytes()].concat()
    });
    let plain = prop::sample::select(
        [
            "]", "}", "(", "e", "u", "a", "s", "t", "l", "d", "0", "1", "2", "N", ")",
        ]
        .map(|code| code.as_bytes().to_vec())
        .to_vec(),
    );
    let number = any::<u8>().prop_map(|number| vec![b'K', number]);
    let wide = prop::collection::vec(any::<u8>(), 0..10).prop_map(|bytes| {
        [
            &[0x8a, u8::try_from(bytes.len()).expect("it is short")],
            &bytes[..],
        ]
        .concat()
    });
    let get = (0_u8..12).prop_map(|at| vec![b'h', at]);
    let rare = prop::sample::select(vec![
        0x94_u8, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8f, 0x90, 0x91,
    ]);
    let rare = rare.prop_map(|code| vec![code]);
    let code = prop_oneof![6 => text, 8 => plain, 3 => number, 1 => wide, 4 => get, 3 => rare];
    prop::collection::vec(code, 0..60).prop_map(|codes| codes.concat())
}

proptest! {
    #[test]
    fn any_opcodes_of_data_are_an_error_or_a_snapshot(codes in opcodes()) {
        let pickle = [b"\x80\x04}(", &codes[..], b"u."].concat();
        read_bytes(&pickle).iter().for_each(holds);
        let pickle = [b"\x80\x04}\x8c\x0ddevice_traces](](}(", &codes[..], b"ueeses."].concat();
        read_bytes(&pickle).iter().for_each(holds);
    }

    #[test]
    fn any_changes_are_an_error_or_a_snapshot(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)
    ) {
        let mut pickle = small();
        for (at, byte) in changes {
            let at = at.index(pickle.len());
            pickle[at] = byte;
        }
        read_bytes(&pickle).iter().for_each(holds);
    }
}
