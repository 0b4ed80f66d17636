//! Parking against damage, full disks, changes and forks, byte by byte.

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::SystemTime;

use proptest::prelude::*;

use super::*;
use crate::store::StoreError;

const MIB: usize = 1 << 20;

/// A parked memory whose bytes tests write and read.
struct Model {
    parking: Parking,
    folder: tempfile::TempDir,
}

fn tensor(name: &str, start: usize, length: usize) -> Tensor {
    (vec![name.to_owned()], start as u64, length as u64).into()
}

fn model(length: usize, tensors: Vec<Tensor>, source: Option<&Path>) -> Model {
    let folder = tempfile::tempdir().unwrap();
    #[expect(unsafe_code, reason = "maps memory")]
    // SAFETY: the tests use it through the arena only, and damage files while no arena shows them.
    let parking = unsafe { Parking::map(length, tensors, folder.path(), source, true) };
    Model {
        parking: parking.unwrap(),
        folder,
    }
}

impl Model {
    /// One tensor that fills the memory.
    fn of(length: usize) -> Self {
        model(length, vec![tensor("all", 0, length)], None)
    }

    fn write(&self, bytes: &[u8]) {
        assert!(!self.parking.is_parked());
        let mut state = self.parking.state.lock().unwrap();
        state.arena.open().unwrap()[..bytes.len()].copy_from_slice(bytes);
    }

    /// What is in memory; nothing when it is parked.
    fn bytes(&self) -> Vec<u8> {
        let state = self.parking.state.lock().unwrap();
        state.arena.bytes().map(<[u8]>::to_vec).unwrap_or_default()
    }

    /// The nameless file, to be damaged.
    fn file(&self) -> std::fs::File {
        let state = self.parking.state.lock().unwrap();
        state
            .copy
            .as_ref()
            .unwrap()
            .spill_handle()
            .unwrap()
            .try_clone()
            .unwrap()
    }

    fn park(&self) -> Result<(), ParkError> {
        self.parking.park(&mut || false)
    }

    fn wake(&self) -> Result<(), ParkError> {
        self.parking.wake(&mut || false)
    }

    /// Begins to wake a memory whose file somebody may have changed; `false` where the system cannot map
    /// files.
    fn begin_wake(&self) -> bool {
        if self.parking.is_parked() {
            self.file().set_modified(SystemTime::now()).unwrap();
        }
        self.parking.begin_wake(&mut || false).unwrap();
        assert!(!self.parking.is_parked());
        self.parking.is_arriving()
    }

    /// Other tests of this process may have a fault at any time.
    fn wake_and_park_undisturbed(&self) {
        for _ in 0..1000 {
            let before = crate::arena::host::major_faults();
            self.wake().unwrap();
            self.park().unwrap();
            if crate::arena::host::major_faults() == before {
                return;
            }
        }
        panic!("other tests read from the disk all the time");
    }

    /// Changes a byte on the disk as a disk does that damages it, and has memory let go of the file.
    fn damage_disk(&self, place: usize, byte: u8) {
        let file = self.file();
        file.write_all_at(&[byte], place as u64).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + super::spill::WRITTEN)
            .unwrap();
        self.evict();
    }

    /// Has memory let go of the file.
    fn evict(&self) {
        let file = self.file();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }

    /// Whether the system is one that tells what of the file is in memory, and lets it leave.
    fn can_leave_memory(&self) -> bool {
        const ON_DISKS: [i64; 3] = [0xef53, 0x5846_5342, 0x9123_683e]; // ext4, XFS, Btrfs
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release.split('.').map_while(|part| part.parse().ok());
        let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let kind = rustix::fs::fstatfs(self.file()).unwrap().f_type;
        version >= (6, 5) && ON_DISKS.contains(&kind)
    }

    fn bring_in(&self, start: usize, length: usize) -> Result<(), ParkError> {
        let part = start as u64..(start + length) as u64;
        self.parking.bring_in(&[part], &mut || false)
    }

    fn written(&self) -> u64 {
        self.parking.statistics().bytes_written
    }

    /// Writes one byte as code does that memfit knows nothing of.
    fn poke(&self, place: usize, byte: u8) {
        let state = self.parking.state.lock().unwrap();
        assert!(place < state.arena.length() && state.arena.bytes().is_some());
        #[expect(unsafe_code, reason = "writes through an address")]
        // SAFETY: the memory is open, and no slice of it lives.
        unsafe {
            std::ptr::with_exposed_provenance_mut::<u8>(state.arena.address() + place).write(byte);
        }
    }

    /// How many pages were written to since the wake.
    fn own_pages(&self) -> Option<usize> {
        let state = self.parking.state.lock().unwrap();
        let written = state.arena.written()?;
        Some(written.into_iter().filter(|&is| is).count())
    }

    /// Bytes of the disk that its files take.
    fn room(&self) -> u64 {
        let state = self.parking.state.lock().unwrap();
        state.copy.as_ref().unwrap().room()
    }
}

fn noise(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    std::iter::repeat_with(next).take(length).collect()
}

#[test]
fn bytes_come_back_at_the_same_address_and_unchanged_ones_are_not_written_again() {
    let model = Model::of(3 * MIB + 4096);
    let bytes = noise(3 * MIB + 4096, 1);
    model.write(&bytes);
    let address = model.parking.address();
    model.park().unwrap();
    assert!(model.parking.is_parked() && model.bytes().is_empty());
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
    assert_eq!(model.parking.address(), address);
    let once = model.written();
    assert_eq!(once, bytes.len() as u64);
    model.park().unwrap();
    assert_eq!(model.written(), once);
    model.wake().unwrap();
    let mut changed = bytes;
    changed[2 * MIB + 5] ^= 1;
    model.write(&changed);
    model.park().unwrap();
    assert_eq!(model.written(), once + MIB as u64);
    model.wake().unwrap();
    assert_eq!(model.bytes(), changed);
    assert_eq!(std::fs::read_dir(model.folder.path()).unwrap().count(), 0);
}

#[test]
fn parking_and_waking_twice_do_nothing() {
    let model = Model::of(MIB);
    model.wake().unwrap();
    model.park().unwrap();
    model.park().unwrap();
    model.wake().unwrap();
    model.wake().unwrap();
    let statistics = model.parking.statistics();
    assert_eq!((statistics.parks, statistics.wakes), (1, 1));
}

#[test]
fn damage_is_noticed_and_the_model_stays_parked_until_it_is_repaired() {
    let model = Model::of(2 * MIB);
    let bytes = noise(2 * MIB, 2);
    model.write(&bytes);
    model.park().unwrap();
    let damage = |model: &Model, byte: u8| {
        let file = model.file();
        file.write_all_at(&[byte], MIB as u64 + 100).unwrap();
    };
    damage(&model, bytes[MIB + 100] ^ 1);
    for _ in 0..2 {
        let error = model.wake().unwrap_err();
        let start = MIB as u64;
        assert!(
            matches!(error, ParkError::Changed { start: at, .. } if at == start),
            "{error}"
        );
        assert!(model.parking.is_parked() && model.bytes().is_empty());
    }
    damage(&model, bytes[MIB + 100]);
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn a_file_that_was_cut_short_is_an_error_of_the_wake() {
    let model = Model::of(2 * MIB);
    model.park().unwrap();
    model.file().set_len(100).unwrap();
    let error = model.wake().unwrap_err();
    assert!(
        matches!(&error, ParkError::Store(StoreError::Transfer { .. })),
        "{error}"
    );
    assert!(model.parking.is_parked());
}

#[test]
fn an_interrupt_leaves_it_as_it_was() {
    let model = Model::of(4 * MIB);
    let bytes = noise(4 * MIB, 3);
    model.write(&bytes);
    assert_eq!(
        model.parking.park(&mut || true),
        Err(ParkError::Interrupted)
    );
    assert_eq!(model.bytes(), bytes);
    model.park().unwrap();
    assert_eq!(
        model.parking.wake(&mut || true),
        Err(ParkError::Interrupted)
    );
    assert!(model.bytes().is_empty());
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn what_was_not_touched_is_neither_compared_nor_written_again() {
    let model = Model::of(4 * MIB);
    let bytes = noise(4 * MIB, 9);
    model.write(&bytes);
    assert_eq!(model.own_pages(), None);
    model.park().unwrap();
    model.wake().unwrap();
    if model.own_pages().is_none() {
        return; // the system does not tell
    }
    assert_eq!(model.own_pages(), Some(0));
    model.poke(MIB + 7, bytes[MIB + 7]);
    assert_eq!(model.own_pages(), Some(1));
    model.park().unwrap();
    assert_eq!(model.written(), 4 * MIB as u64);
    assert_eq!(model.parking.statistics().bytes_unchanged, 4 * MIB as u64);
    model.wake().unwrap();
    model.poke(MIB + 7, bytes[MIB + 7] ^ 1);
    model.park().unwrap();
    assert_eq!(model.written(), 5 * MIB as u64);
    model.wake().unwrap();
    assert_eq!(model.own_pages(), Some(0));
    assert_eq!(model.bytes()[MIB + 7], bytes[MIB + 7] ^ 1);
}

#[test]
fn damage_behind_the_first_wake_is_noticed_too() {
    let model = Model::of(3 * MIB);
    let bytes = noise(3 * MIB, 10);
    model.write(&bytes);
    model.park().unwrap();
    for _ in 0..3 {
        model.wake().unwrap();
        model.park().unwrap();
    }
    let damaged = [bytes[5] ^ 1];
    model.file().write_all_at(&damaged, 5).unwrap();
    let error = model.wake().unwrap_err();
    assert!(
        matches!(error, ParkError::Changed { start: 0, .. }),
        "{error}"
    );
    assert!(model.parking.is_parked() && model.bytes().is_empty());
    model.file().write_all_at(&bytes[5..6], 5).unwrap();
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn what_stayed_in_memory_is_not_read_again_and_what_left_it_is_compared() {
    let model = Model::of(3 * MIB);
    let bytes = noise(3 * MIB, 14);
    model.write(&bytes);
    model.park().unwrap();
    if !model.can_leave_memory() {
        return;
    }
    let read = || model.parking.statistics().bytes_read;
    model.wake().unwrap();
    assert_eq!((read(), &model.bytes()), (0, &bytes));
    model.park().unwrap();
    model.evict();
    model.wake().unwrap();
    assert_eq!(read(), 3 * MIB as u64);
    model.park().unwrap();
    model.wake_and_park_undisturbed();
    let before = read();
    model.wake().unwrap();
    assert_eq!((read(), &model.bytes()), (before, &bytes));
    model.park().unwrap();
    model.damage_disk(2 * MIB + 9, bytes[2 * MIB + 9] ^ 1);
    for _ in 0..2 {
        let error = model.wake().unwrap_err();
        assert!(matches!(error, ParkError::Changed { .. }), "{error}");
    }
    model.damage_disk(2 * MIB + 9, bytes[2 * MIB + 9]);
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn what_was_read_again_while_it_was_awake_is_compared_at_the_next_wake() {
    let model = Model::of(3 * MIB);
    let bytes = noise(3 * MIB, 15);
    model.write(&bytes);
    model.park().unwrap();
    if !model.can_leave_memory() {
        return;
    }
    model.evict();
    model.wake().unwrap();
    let before = model.parking.statistics().bytes_read;
    let start = std::ptr::with_exposed_provenance_mut(model.parking.address());
    #[expect(unsafe_code, reason = "has pages leave memory as the system does")]
    // SAFETY: they are mapped, and come back when they are touched.
    unsafe {
        rustix::mm::madvise(start, 3 * MIB, rustix::mm::Advice::LinuxPageOut).unwrap();
    }
    assert_eq!(model.bytes(), bytes);
    model.park().unwrap();
    model.wake().unwrap();
    assert_eq!(
        model.parking.statistics().bytes_read,
        before + 3 * MIB as u64
    );
}

#[test]
fn parts_of_a_memory_that_is_still_read_come_when_they_are_wanted() {
    let model = Model::of(3 * MIB + 4096);
    let bytes = noise(3 * MIB + 4096, 11);
    model.write(&bytes);
    model.park().unwrap();
    model.bring_in(0, MIB).unwrap();
    assert!(model.parking.is_parked() && !model.parking.is_arriving());
    if !model.begin_wake() {
        return;
    }
    assert_eq!(model.parking.statistics().bytes_read, 0);
    for _ in 0..2 {
        model.bring_in(2 * MIB - 1, 1).unwrap();
        assert_eq!(model.parking.statistics().bytes_read, MIB as u64);
    }
    model.bring_in(2 * MIB - 1, 2).unwrap();
    assert_eq!(model.parking.statistics().bytes_read, 2 * MIB as u64);
    model.bring_in(5 * MIB, MIB).unwrap();
    assert_eq!(model.bytes()[MIB..3 * MIB], bytes[MIB..3 * MIB]);
    assert!(model.parking.is_arriving());
    model.wake().unwrap();
    assert!(!model.parking.is_arriving());
    assert_eq!(model.bytes(), bytes);
    let statistics = model.parking.statistics();
    assert_eq!(statistics.bytes_read, bytes.len() as u64);
    assert_eq!(statistics.wakes, 1);
}

#[test]
fn the_last_part_ends_an_arrival() {
    let model = Model::of(2 * MIB);
    model.park().unwrap();
    if !model.begin_wake() {
        return;
    }
    model.bring_in(0, MIB).unwrap();
    assert!(model.parking.is_arriving());
    model.bring_in(MIB, MIB).unwrap();
    assert!(!model.parking.is_arriving());
}

#[test]
fn damage_is_an_error_of_the_part_and_is_never_taken_for_new_bytes() {
    let model = Model::of(3 * MIB);
    let bytes = noise(3 * MIB, 12);
    model.write(&bytes);
    model.park().unwrap();
    let place = MIB + 4096;
    let damaged = [bytes[place] ^ 1];
    model.file().write_all_at(&damaged, place as u64).unwrap();
    let start = MIB as u64;
    let is_found =
        |error: &ParkError| matches!(error, ParkError::Changed { start: at, .. } if *at == start);
    for is_touched in [false, true] {
        if !model.begin_wake() {
            return;
        }
        model.bring_in(0, MIB).unwrap();
        for _ in 0..2 {
            let error = model.bring_in(MIB, 1).unwrap_err();
            assert!(is_found(&error), "{error}");
        }
        assert!(is_found(&model.wake().unwrap_err()) && model.parking.is_arriving());
        if is_touched {
            // Its page is the process's own then, with the damage in it.
            model.poke(place + 1, bytes[place + 1]);
        }
        model.park().unwrap();
        assert_eq!(model.written(), bytes.len() as u64);
        let error = model.wake().unwrap_err();
        assert!(is_found(&error) && model.parking.is_parked(), "{error}");
    }
    let repaired = &bytes[place..=place];
    model.file().write_all_at(repaired, place as u64).unwrap();
    assert!(model.begin_wake());
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn a_file_that_was_cut_short_is_an_error_of_the_part_that_is_missing() {
    let model = Model::of(2 * MIB);
    model.park().unwrap();
    model.file().set_len(MIB as u64).unwrap();
    if !model.begin_wake() {
        return;
    }
    model.bring_in(0, MIB).unwrap();
    let error = model.bring_in(MIB, 1).unwrap_err();
    assert!(
        matches!(&error, ParkError::Store(StoreError::Transfer { .. })),
        "{error}"
    );
}

#[test]
fn an_arrival_can_be_interrupted_given_up_and_dropped() {
    let model = Model::of(2 * MIB);
    let bytes = noise(2 * MIB, 13);
    model.write(&bytes);
    model.park().unwrap();
    if !model.begin_wake() {
        return;
    }
    let part = std::slice::from_ref(&(0..1));
    let error = model.parking.bring_in(part, &mut || true).unwrap_err();
    assert_eq!(error, ParkError::Interrupted);
    model.parking.give_up(&mut || false).unwrap();
    assert_eq!((model.bytes(), model.own_pages()), (bytes, None));
    let model = Model::of(64 * MIB);
    model.park().unwrap();
    model.begin_wake();
}

#[test]
fn files_never_take_more_than_three_times_the_memory() {
    let length = 12 * MIB;
    let model = Model::of(length);
    let mut bytes = noise(length, 11);
    model.write(&bytes);
    model.park().unwrap();
    // Each time one piece less is changed, so that every file has one that is still needed.
    for round in 0..12 {
        model.wake().unwrap();
        for place in (round * MIB..length).step_by(MIB) {
            bytes[place] ^= 1;
            model.poke(place, bytes[place]);
        }
        model.park().unwrap();
        assert!(model.room() <= 3 * length as u64, "{}", model.room());
    }
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn a_memory_that_was_given_up_has_its_bytes_and_nothing_of_a_file() {
    let model = Model::of(3 * MIB);
    let bytes = noise(3 * MIB, 12);
    model.write(&bytes);
    model.park().unwrap();
    model.wake().unwrap();
    model.poke(1, 77);
    let start = model.parking.address();
    let names_files = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        maps.lines().any(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let from = usize::from_str_radix(range.split_once('-').unwrap().0, 16).unwrap();
            (start..start + 3 * MIB).contains(&from) && rest.contains('/')
        })
    };
    assert_eq!(names_files(), model.own_pages().is_some());
    model.parking.give_up(&mut || false).unwrap();
    assert!(!names_files());
    assert_eq!(model.bytes()[2..], bytes[2..]);
    assert_eq!(model.bytes()[1], 77);
    assert_eq!(model.park(), Err(ParkError::GivenUp));
}

/// Writes a safetensors file with one tensor.
fn weights(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let length = bytes.len();
    let header =
        format!(r#"{{"{name}":{{"dtype":"U8","shape":[{length}],"data_offsets":[0,{length}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    let path = folder.join("model.safetensors");
    std::fs::write(&path, file).unwrap();
    path
}

#[test]
fn a_weights_file_stands_in_for_what_has_not_changed_since() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = noise(3 * MIB, 4);
    let path = weights(folder.path(), "w", &bytes);
    let tensors = vec![tensor("w", 64, 3 * MIB), tensor("b", 3 * MIB + 64, 64)];
    let model = model(3 * MIB + 128, tensors, Some(&path));
    let mut whole = [vec![0; 64], bytes, noise(64, 5)].concat();
    model.write(&whole);
    model.park().unwrap();
    assert_eq!(model.written(), 64);
    assert_eq!(model.parking.statistics().bytes_in_source, 3 * MIB as u64);
    model.wake().unwrap();
    assert_eq!(model.bytes()[..whole.len()], whole);
    whole[64 + 2 * MIB] ^= 1;
    model.write(&whole);
    std::fs::remove_file(&path).unwrap();
    model.park().unwrap();
    assert_eq!(model.written(), 64 + MIB as u64);
    model.wake().unwrap();
    assert_eq!(model.bytes()[..whole.len()], whole);
}

#[test]
fn a_weights_file_that_changes_while_its_model_is_parked_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = noise(2 * MIB, 6);
    let path = weights(folder.path(), "encoder.w", &bytes);
    let model = model(2 * MIB, vec![tensor("encoder.w", 0, 2 * MIB)], Some(&path));
    model.write(&bytes);
    model.park().unwrap();
    let before = std::fs::read(&path).unwrap();
    let mut after = before.clone();
    let last = after.len() - 1;
    after[last] ^= 1;
    for damaged in [&after[..], &after[..MIB]] {
        std::fs::write(&path, damaged).unwrap();
        let ParkError::SourceChanged {
            path: named,
            tensor,
        } = model.wake().unwrap_err()
        else {
            panic!("another error");
        };
        assert_eq!((named, tensor.as_str()), (path.clone(), "encoder.w"));
        assert!(model.parking.is_parked());
    }
    std::fs::write(&path, before).unwrap();
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

#[test]
fn a_weights_file_of_other_weights_is_of_no_use_and_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = weights(folder.path(), "w", &noise(MIB, 7));
    let model = model(MIB, vec![tensor("w", 0, MIB)], Some(&path));
    let bytes = noise(MIB, 8);
    model.write(&bytes);
    model.park().unwrap();
    assert_eq!(model.written(), MIB as u64);
    model.wake().unwrap();
    assert_eq!(model.bytes(), bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Against a plain copy: after any writes, parks and wakes the bytes are those last written, and no
    /// more is written to the disk than the pieces that differ from what was parked before.
    #[test]
    fn any_history_keeps_every_byte(
        steps in prop::collection::vec((0_usize..5, 0_usize..5 * MIB / 2, any::<u8>()), 1..16)
    ) {
        let length = 5 * MIB / 2;
        let model = Model::of(length);
        let mut plain = vec![0_u8; length];
        let mut parked: Option<Vec<u8>> = None;
        for (step, place, byte) in steps {
            match step {
                0 if !model.parking.is_parked() => {
                    model.bring_in(place, 1).unwrap();
                    plain[place] = byte;
                    model.poke(place, byte);
                }
                1 if !model.parking.is_parked() => {
                    let before = model.written();
                    model.park().unwrap();
                    let differs = |(number, piece): (usize, &[u8])| {
                        let start = number * MIB;
                        let old = parked.as_ref().map(|old| &old[start..start + piece.len()]);
                        if old == Some(piece) { 0 } else { piece.len() as u64 }
                    };
                    let expected: u64 = plain.chunks(MIB).enumerate().map(differs).sum();
                    prop_assert_eq!(model.written() - before, expected);
                    parked = Some(plain.clone());
                }
                2 => {
                    model.begin_wake();
                }
                3 if !model.parking.is_parked() => {
                    let end = plain.len().min(place + usize::from(byte) * 4096);
                    model.bring_in(place, end - place).unwrap();
                    prop_assert_eq!(&model.bytes()[place..end], &plain[place..end]);
                }
                _ => {
                    model.wake().unwrap();
                    prop_assert_eq!(&model.bytes(), &plain);
                }
            }
        }
    }
}

#[test]
fn memory_that_nobody_has_is_refused_with_its_length() {
    let folder = tempfile::tempdir().unwrap();
    #[expect(unsafe_code, reason = "maps memory")]
    // SAFETY: nothing is mapped.
    let refused = unsafe { Parking::map(usize::MAX, Vec::new(), folder.path(), None, true) };
    let error = refused.err().unwrap();
    let said = "no memory of 16777216.00 TiB to park a model in: ";
    assert!(error.to_string().starts_with(said), "{error}");
    assert_eq!(error.reason(), "no_memory");
}
