//! The arena against the stand-in: what it holds, what survives, and every way in which a call can fail.

use std::sync::Arc;

use proptest::prelude::*;

use super::stand_in::{Counts, OUT_OF_MEMORY, StandIn};
use super::{Arena, Device, HostMemory, TensorPlace, VmmError, lend};

const MIB: u64 = 1 << 20;
/// Three chunks of 32 MiB, the last of them shorter.
const LENGTH: u64 = 70 * MIB;

/// Places at the seams of chunks and inside them.
const PLACES: [u64; 6] = [0, 31 * MIB, 32 * MIB, 50 * MIB, 64 * MIB, 70 * MIB - 4096];

fn fill(arena: &mut Arena, seed: u64) {
    for place in PLACES {
        let value = u8::try_from((seed * 7 + place / MIB) % 251).unwrap();
        arena.copy_in(place, &[value; 4096]).unwrap();
    }
}

fn is_filled(arena: &Arena, seed: u64) -> bool {
    PLACES.iter().all(|place| {
        let value = u8::try_from((seed * 7 + place / MIB) % 251).unwrap();
        let mut bytes = [0; 4096];
        arena.copy_out(*place, &mut bytes).unwrap();
        bytes == [value; 4096]
    })
}

fn arena(driver: &StandIn, length: u64) -> Arena {
    Arena::reserve(driver.device().unwrap(), length).unwrap()
}

#[test]
fn a_closed_arena_keeps_its_address_and_holds_nothing() {
    let driver = StandIn::new();
    let mut arena = arena(&driver, LENGTH);
    let address = arena.address();
    assert_eq!(arena.length(), LENGTH);
    assert_eq!((arena.open_bytes(), arena.held_bytes()), (0, 0));
    arena.open().unwrap();
    fill(&mut arena, 1);
    assert!(is_filled(&arena, 1));
    assert_eq!(driver.counts().used_bytes, LENGTH);
    arena.close().unwrap();
    assert_eq!(driver.counts().used_bytes, 0);
    assert_eq!(driver.counts().reservations, 1);
    arena.open().unwrap();
    assert_eq!(arena.address(), address);
    assert!(!is_filled(&arena, 1));
    drop(arena);
    assert_eq!(driver.counts().held(), Counts::default());
}

#[test]
fn it_opens_by_and_by_and_keeps_what_was_there() {
    let driver = StandIn::new();
    let mut arena = arena(&driver, LENGTH);
    arena.open_to(1).unwrap();
    assert_eq!(arena.open_bytes(), 32 * MIB);
    arena.copy_in(0, &[7; 4096]).unwrap();
    arena.open_to(33 * MIB).unwrap();
    assert_eq!(driver.counts().used_bytes, 64 * MIB);
    arena.open().unwrap();
    assert_eq!(driver.counts().used_bytes, LENGTH);
    let mut back = [0; 4096];
    arena.copy_out(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    arena.open().unwrap();
    assert_eq!(driver.counts().misuses, 0);
}

#[test]
fn nothing_is_read_or_written_where_nothing_is_open() {
    let driver = StandIn::new();
    let mut arena = arena(&driver, LENGTH);
    let closed = VmmError::Range { start: 0, end: 1 };
    assert_eq!(arena.copy_out(0, &mut [0]), Err(closed.clone()));
    assert_eq!(arena.copy_in(0, &[0]), Err(closed));
    arena.open_to(1).unwrap();
    assert!(arena.copy_in(32 * MIB - 1, &[0]).is_ok());
    assert!(arena.copy_in(32 * MIB - 1, &[0, 0]).is_err());
    assert!(arena.copy_in(u64::MAX, &[0, 0]).is_err());
    assert!(arena.open_to(LENGTH + 1).is_err());
    assert_eq!(driver.counts().misuses, 0);
}

#[test]
fn no_room_is_told_with_bytes_and_takes_none() {
    let driver = StandIn::new();
    driver.set(usize::try_from(60 * MIB).unwrap(), usize::MAX, false);
    let mut arena = arena(&driver, LENGTH);
    let wanted = VmmError::NoRoom {
        device: 0,
        wanted: LENGTH - 32 * MIB,
        free: Some(28 * MIB),
    };
    assert_eq!(arena.open(), Err(wanted));
    assert_eq!((arena.open_bytes(), arena.held_bytes()), (0, 0));
    assert_eq!(driver.counts().used_bytes, 0);
    driver.set(1 << 30, usize::MAX, false);
    arena.open().unwrap();
}

#[test]
fn a_close_waits_for_the_device_and_so_does_a_drop() {
    let driver = StandIn::new();
    let mut arena = arena(&driver, LENGTH);
    arena.open().unwrap();
    driver.launch();
    arena.close().unwrap();
    arena.open().unwrap();
    driver.launch();
    drop(arena);
    assert_eq!(driver.counts().held(), Counts::default());
}

/// Whatever call fails, a close leaves every byte or nothing, and nothing is lost.
#[test]
fn every_call_of_a_close_may_fail_once() {
    let driver = StandIn::new();
    let mut arena = arena(&driver, LENGTH);
    let before = driver.counts().held();
    let mut failures = 0;
    for at in 1.. {
        arena.open().unwrap();
        fill(&mut arena, at);
        driver.fail(at, false, 700);
        let closed = arena.close();
        let is_over = driver.counts().calls < at;
        driver.fail(0, false, 0);
        if closed.is_err() {
            failures += 1;
            assert_eq!(arena.open_bytes(), LENGTH, "call {at}");
            assert!(is_filled(&arena, at), "call {at}");
            arena.close().unwrap();
        }
        assert_eq!(arena.open_bytes(), 0);
        assert_eq!(driver.counts().used_bytes, arena.held_bytes());
        arena.close().unwrap();
        assert_eq!(driver.counts().held(), before, "call {at}");
        if is_over {
            break;
        }
    }
    // Pushing the context, waiting, and unmapping each of three chunks; what comes after is undone later.
    assert_eq!(failures, 5);
}

/// Whatever call fails, an open leaves the arena closed and takes nothing.
#[test]
fn every_call_of_an_open_may_fail_once() {
    let driver = StandIn::new();
    let mut arena = arena(&driver, LENGTH);
    let before = driver.counts().held();
    let mut failures = 0;
    for code in [700, OUT_OF_MEMORY] {
        for at in 1.. {
            driver.fail(at, false, code);
            let opened = arena.open();
            let is_over = driver.counts().calls < at;
            driver.fail(0, false, 0);
            if opened.is_err() {
                failures += 1;
                assert_eq!(
                    (arena.open_bytes(), arena.held_bytes()),
                    (0, 0),
                    "call {at}"
                );
                assert_eq!(driver.counts().held(), before, "call {at}");
                arena.open().unwrap();
            }
            fill(&mut arena, 3);
            assert!(is_filled(&arena, 3));
            arena.close().unwrap();
            if is_over {
                break;
            }
        }
    }
    // Twice: pushing the context, taking and mapping each of three chunks, and access to them.
    assert_eq!(failures, 2 * 8);
}

/// A driver that fails from some call on cannot even undo; it is found when it works again.
#[test]
fn what_could_not_be_undone_is_undone_later() {
    let driver = StandIn::new();
    let nothing = driver.counts().held();
    for at in 1..30 {
        let mut arena = arena(&driver, LENGTH);
        driver.fail(at, true, 700);
        let opened = arena.open().is_ok();
        driver.fail(0, false, 0);
        assert_eq!(arena.held_bytes(), driver.counts().used_bytes);
        if at % 2 == 0 && !opened {
            arena.open().unwrap();
            fill(&mut arena, 5);
            assert!(is_filled(&arena, 5));
        }
        if at % 3 == 0 {
            driver.fail(at, true, 700);
            let _refused = arena.close();
            driver.fail(0, false, 0);
            assert_eq!(arena.held_bytes(), driver.counts().used_bytes);
        }
        drop(arena);
        assert_eq!(driver.counts().held(), nothing, "call {at}");
    }
}

#[test]
fn every_call_of_a_drop_may_fail_once() {
    let driver = StandIn::new();
    for at in 1.. {
        let mut arena = arena(&driver, LENGTH);
        arena.open().unwrap();
        let memory = HostMemory::new(Arc::clone(arena.device()), MIB).unwrap();
        driver.fail(at, false, 700);
        drop((memory, arena));
        let is_over = driver.counts().calls < at;
        assert_eq!(driver.counts().held(), Counts::default(), "call {at}");
        if is_over {
            break;
        }
    }
    driver.fail(0, false, 0);
}

#[test]
fn every_call_that_opens_a_device_or_reserves_may_fail() {
    let driver = StandIn::new();
    for at in 1.. {
        driver.fail(at, false, 700);
        let made = driver
            .device()
            .and_then(|device| Arena::reserve(device, LENGTH));
        let is_over = driver.counts().calls < at;
        driver.fail(0, false, 0);
        assert!(!is_over || made.is_ok());
        drop(made);
        assert_eq!(driver.counts().held(), Counts::default(), "call {at}");
        if is_over {
            break;
        }
    }
}

#[test]
fn what_cannot_be_had_is_refused_by_name() {
    let driver = StandIn::new();
    let device = driver.device().unwrap();
    for wanted in [0, u64::MAX, u64::MAX / 2] {
        let refused = Arena::reserve(Arc::clone(&device), wanted).err();
        assert_eq!(refused, Some(VmmError::Length { wanted }));
    }
    assert_eq!(
        Device::open_with(driver.path(), 1)
            .err()
            .unwrap()
            .to_string(),
        "the CUDA driver refused `cuDeviceGet` with CUDA_ERROR_STAND_IN (101)"
    );
    driver.set(1 << 30, 0, true);
    let unsupported = driver.device().err();
    assert_eq!(unsupported, Some(VmmError::Unsupported { device: 0 }));
    let missing = Device::open_with("no-such-driver.so", 0).err().unwrap();
    assert!(
        missing
            .to_string()
            .starts_with("the CUDA driver `no-such-driver.so` cannot be opened: ")
    );
    let other = Device::open_with("libc.so.6", 0).err().unwrap();
    assert_eq!(
        other.to_string(),
        "the CUDA driver `libc.so.6` has no `cuInit`\nhint: update it; CUDA 11 or later is needed"
    );
}

#[test]
fn host_memory_is_pinned_exactly_or_ordinary() {
    let driver = StandIn::new();
    let device = driver.device().unwrap();
    let mut memory = HostMemory::new(Arc::clone(&device), 3 * MIB + 5).unwrap();
    assert!(memory.is_pinned());
    assert_eq!(driver.counts().pinned_bytes, 3 * MIB + 5);
    memory.bytes_mut().fill(9);
    assert!(memory.bytes().iter().all(|&byte| byte == 9));
    drop(memory);
    assert_eq!(driver.counts().pinned_bytes, 0);
    driver.set(1 << 30, 1 << 20, false);
    let memory = HostMemory::new(Arc::clone(&device), 2 * MIB).unwrap();
    assert!(!memory.is_pinned());
    assert_eq!(memory.bytes().len() as u64, 2 * MIB);
    drop(memory);
    assert!(HostMemory::new(Arc::clone(&device), 0).is_err());
    assert!(HostMemory::new(device, u64::MAX).is_err());
    assert_eq!(driver.counts().misuses, 0);
}

#[test]
fn lent_memory_lives_as_long_as_its_tensor() {
    #![expect(unsafe_code, reason = "plays the framework that takes a tensor")]
    let owner = Arc::new(());
    let lent = lend(4096, 10, TensorPlace::Cuda, 3, Box::new(Arc::clone(&owner)));
    assert_eq!(Arc::strong_count(&owner), 2);
    // SAFETY: it was lent just now, and nothing else lets it go.
    unsafe { super::ManagedTensor::let_go(lent) };
    assert_eq!(Arc::strong_count(&owner), 1);
}

/// What may happen to some arenas on one device.
#[derive(Debug, Clone)]
enum Event {
    Reserve(u64),
    OpenTo(usize, u64),
    Close(usize),
    Drop(usize),
    Fail(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (1..90 * MIB).prop_map(Event::Reserve),
        (0..4_usize, 0..90 * MIB).prop_map(|(which, end)| Event::OpenTo(which, end)),
        (0..4_usize).prop_map(Event::Close),
        (0..4_usize).prop_map(Event::Drop),
        (1..12_u64).prop_map(Event::Fail),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// A twin that knows of each arena only how far it is open, and of the device only its size.
    #[test]
    fn histories_are_those_of_a_simple_twin(events in prop::collection::vec(event(), 1..40)) {
        const TOTAL: u64 = 128 * MIB;
        let driver = StandIn::new();
        driver.set(usize::try_from(TOTAL).unwrap(), usize::MAX, false);
        let device = driver.device().unwrap();
        let mut arenas: Vec<(Arena, u64)> = Vec::new();
        let mut is_broken = false;
        for event in events {
            match event {
                Event::Reserve(length) if arenas.len() < 4 => {
                    if let Ok(arena) = Arena::reserve(Arc::clone(&device), length) {
                        prop_assert_eq!(arena.length(), length.next_multiple_of(2 * MIB));
                        arenas.push((arena, 0));
                    } else {
                        prop_assert!(is_broken);
                    }
                }
                Event::OpenTo(which, end) if which < arenas.len() => {
                    let elsewhere: u64 = arenas.iter().enumerate()
                        .filter(|&(number, _)| number != which)
                        .map(|(_, (arena, _))| arena.held_bytes())
                        .sum();
                    let (arena, open) = &mut arenas[which];
                    let chunk = (32 * MIB).min(arena.length());
                    let wanted = end.next_multiple_of(chunk).min(arena.length()).max(*open);
                    let is_possible = end <= arena.length() && elsewhere + wanted <= TOTAL;
                    let opened = arena.open_to(end).is_ok();
                    prop_assert!(is_possible || !opened || wanted == *open);
                    if !is_broken {
                        prop_assert_eq!(opened, is_possible);
                    }
                    if opened {
                        *open = wanted;
                    }
                }
                Event::Close(which) if which < arenas.len() => {
                    let (arena, open) = &mut arenas[which];
                    let closed = arena.close().is_ok();
                    prop_assert!(closed || is_broken);
                    if closed {
                        *open = 0;
                    }
                }
                Event::Drop(which) if which < arenas.len() => {
                    driver.fail(0, false, 0);
                    drop(arenas.remove(which));
                }
                Event::Fail(at) => {
                    driver.fail(at, false, 999);
                    is_broken = true;
                }
                _ => {}
            }
            for (arena, open) in &arenas {
                prop_assert_eq!(arena.open_bytes(), *open);
            }
            let held: u64 = arenas.iter().map(|(arena, _)| arena.held_bytes()).sum();
            prop_assert_eq!(driver.counts().used_bytes, held);
            prop_assert_eq!(driver.counts().reservations, arenas.len() as u64);
            prop_assert_eq!(driver.counts().misuses, 0);
        }
        driver.fail(0, false, 0);
        drop(arenas);
        drop(device);
        prop_assert_eq!(driver.counts().held(), Counts::default());
    }
}
