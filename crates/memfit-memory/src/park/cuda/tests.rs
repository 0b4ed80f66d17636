//! Parking on a device against the stand-in for its driver.

use std::sync::Arc;

use std::os::unix::fs::FileExt as _;

use tempfile::TempDir;

use super::copy::PIECE_BYTES;
use super::{CudaParking, CudaStatistics};
use crate::arena::cuda::ManagedTensor;
use crate::arena::cuda::stand_in::{Counts, OUT_OF_MEMORY, StandIn};
use crate::park::host::ParkError;

/// Three pieces, the last of them shorter.
const LENGTH: u64 = 10 << 20;
const DEVICE: usize = 1 << 30;

struct Fixture {
    driver: StandIn,
    parking: Option<CudaParking>,
    folder: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let driver = StandIn::new();
        let folder = tempfile::tempdir().unwrap();
        let device = driver.device().unwrap();
        let parking = CudaParking::new(device, LENGTH, folder.path(), true).unwrap();
        parking.open_to(LENGTH).unwrap();
        Self {
            driver,
            parking: Some(parking),
            folder,
        }
    }

    fn parking(&self) -> &CudaParking {
        self.parking.as_ref().unwrap()
    }

    fn fill(&self, seed: u8) {
        let mut state = self.parking().lock_here().unwrap();
        state.arena.copy_in(0, &pattern(seed)).unwrap();
    }

    fn has(&self, seed: u8) -> bool {
        let mut bytes = vec![0; pattern(seed).len()];
        let state = self.parking().lock_here().unwrap();
        state.arena.copy_out(0, &mut bytes).unwrap();
        bytes == pattern(seed)
    }

    fn park(&self, host_bytes: u64) -> Result<(), ParkError> {
        self.parking().park(Some(host_bytes), &mut || false)
    }

    fn wake(&self) -> Result<(), ParkError> {
        self.parking().wake(&mut || false)
    }

    fn statistics(&self) -> CudaStatistics {
        self.parking().statistics()
    }

    /// What the device holds is what the parking says, and nothing of the host's is pinned but its copy, which
    /// the driver may have refused to pin.
    fn check_books(&self) {
        let counts = self.driver.counts();
        assert_eq!(counts.misuses, 0);
        assert_eq!(counts.used_bytes, self.parking().held_bytes().unwrap());
        let host_bytes = self.parking().host_bytes().unwrap();
        assert!([0, host_bytes].contains(&counts.pinned_bytes), "{counts:?}");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.driver.fail(0, false, 0);
        self.parking = None;
        if !std::thread::panicking() {
            assert_eq!(self.driver.counts().held(), Counts::default());
            assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 0);
        }
    }
}

fn pattern(seed: u8) -> Vec<u8> {
    // Pieces differ from each other, so that one in another's place would be seen.
    let mut bytes = vec![seed; usize::try_from(LENGTH).unwrap()];
    for (number, page) in bytes.chunks_mut(4096).enumerate() {
        page[..8].copy_from_slice(&(number as u64).to_le_bytes());
    }
    bytes
}

#[test]
fn bytes_come_back_from_the_host_from_the_disk_and_from_both() {
    for host_bytes in [
        u64::MAX,
        0,
        PIECE_BYTES,
        2 * PIECE_BYTES,
        2 * PIECE_BYTES + 1,
    ] {
        let fixture = Fixture::new();
        let address = fixture.parking().address();
        for seed in [3, 4] {
            fixture.fill(seed);
            fixture.park(host_bytes).unwrap();
            assert!(fixture.parking().is_parked());
            assert_eq!(fixture.driver.counts().used_bytes, 0);
            fixture.check_books();
            fixture.wake().unwrap();
            assert!(fixture.has(seed));
            assert_eq!(fixture.parking().address(), address);
            assert_eq!(fixture.parking().host_bytes().unwrap(), 0);
        }
        let in_host = (host_bytes / PIECE_BYTES * PIECE_BYTES).min(LENGTH);
        let in_host = if host_bytes >= LENGTH {
            LENGTH
        } else {
            in_host
        };
        let statistics = fixture.statistics();
        assert_eq!(statistics.bytes_to_host, 2 * in_host);
        assert_eq!(statistics.bytes_written, 2 * (LENGTH - in_host));
        assert_eq!(statistics.bytes_read, 2 * (LENGTH - in_host));
        assert_eq!((statistics.parks, statistics.wakes), (2, 2));
    }
}

#[test]
fn what_the_file_has_is_not_written_again() {
    let fixture = Fixture::new();
    fixture.fill(1);
    for _ in 0..3 {
        fixture.park(PIECE_BYTES).unwrap();
        fixture.wake().unwrap();
    }
    assert_eq!(fixture.statistics().bytes_written, LENGTH - PIECE_BYTES);
    assert_eq!(
        fixture.statistics().bytes_unchanged,
        2 * (LENGTH - PIECE_BYTES)
    );
    let mut state = fixture.parking().lock_here().unwrap();
    state.arena.copy_in(LENGTH - 1, &[77]).unwrap();
    drop(state);
    fixture.park(PIECE_BYTES).unwrap();
    let written = fixture.statistics().bytes_written;
    assert_eq!(written, LENGTH - PIECE_BYTES + LENGTH % PIECE_BYTES);
    fixture.wake().unwrap();
}

#[test]
fn a_copy_in_the_host_moves_to_the_disk_when_asked() {
    let fixture = Fixture::new();
    fixture.fill(5);
    fixture.parking().to_disk(&mut || false).unwrap();
    fixture.park(u64::MAX).unwrap();
    assert_eq!(fixture.parking().host_bytes().unwrap(), LENGTH);
    let stopped = fixture.parking().to_disk(&mut || true);
    assert_eq!(stopped, Err(ParkError::Interrupted));
    assert_eq!(fixture.parking().host_bytes().unwrap(), LENGTH);
    fixture.parking().to_disk(&mut || false).unwrap();
    assert_eq!(fixture.parking().host_bytes().unwrap(), 0);
    fixture.check_books();
    fixture.wake().unwrap();
    assert!(fixture.has(5));
    assert_eq!(fixture.statistics().bytes_read, LENGTH);
}

#[test]
fn a_host_that_pins_nothing_keeps_the_copy_all_the_same() {
    let fixture = Fixture::new();
    fixture.driver.set(DEVICE, 0, false);
    fixture.fill(6);
    fixture.park(u64::MAX).unwrap();
    assert_eq!(fixture.driver.counts().pinned_bytes, 0);
    assert_eq!(fixture.parking().host_bytes().unwrap(), LENGTH);
    fixture.wake().unwrap();
    assert!(fixture.has(6));
}

#[test]
fn a_wake_without_room_leaves_it_parked_and_whole() {
    let fixture = Fixture::new();
    fixture.fill(7);
    fixture.park(PIECE_BYTES).unwrap();
    fixture.driver.set(1 << 20, usize::MAX, false);
    let refused = fixture.wake().unwrap_err();
    assert_eq!(refused.reason(), "no_memory");
    assert_eq!(
        refused.to_string(),
        "no memory to wake 10.0 MiB (10485760 bytes): device 0 has no room for 10.0 MiB: 1.0 MiB is \
         free; the model stays parked, and whole\nhint: park or end something else, and wake it again"
    );
    fixture.check_books();
    fixture.driver.set(DEVICE, usize::MAX, false);
    fixture.wake().unwrap();
    assert!(fixture.has(7));
}

#[test]
fn damage_is_found_wherever_the_copy_is_and_nothing_of_it_is_used() {
    let fixture = Fixture::new();
    fixture.fill(8);
    fixture.park(PIECE_BYTES).unwrap();
    let damage = |at: u64, by: u8| {
        let mut state = fixture.parking().lock_here().unwrap();
        let copy = state.copy.as_mut().unwrap();
        if at < PIECE_BYTES {
            let at = usize::try_from(at).unwrap();
            copy.host_mut().unwrap().bytes_mut()[at] ^= by;
        } else {
            let mut byte = [0];
            let file = copy.spill_handle();
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ by], at).unwrap();
        }
    };
    for at in [0, PIECE_BYTES - 1, PIECE_BYTES, LENGTH - 1] {
        damage(at, 1);
        let refused = fixture.wake().unwrap_err();
        assert_eq!(refused.reason(), "changed");
        assert!(fixture.parking().is_parked());
        assert_eq!(fixture.driver.counts().used_bytes, 0);
        damage(at, 1);
    }
    fixture.wake().unwrap();
    assert!(fixture.has(8));
}

/// Whatever call of the driver fails in a park or a wake, the model is whole before and after.
#[test]
fn every_call_may_fail_once() {
    let fixture = Fixture::new();
    fixture.fill(9);
    let mut failures = 0;
    for (host_bytes, code) in [(0, OUT_OF_MEMORY), (PIECE_BYTES, 700)] {
        for at in 1.. {
            fixture.driver.fail(at, false, code);
            let parked = fixture.park(host_bytes);
            let calls_of_park = fixture.driver.counts().calls;
            fixture.driver.fail(0, false, 0);
            if parked.is_err() {
                failures += 1;
                assert!(!fixture.parking().is_parked());
                assert!(fixture.has(9), "call {at} of a park");
                fixture.park(host_bytes).unwrap();
            }
            fixture.check_books();
            fixture.driver.fail(at, false, code);
            let woken = fixture.wake();
            let calls_of_wake = fixture.driver.counts().calls;
            fixture.driver.fail(0, false, 0);
            if woken.is_err() {
                failures += 1;
                assert!(fixture.parking().is_parked());
                fixture.check_books();
                assert_eq!(fixture.parking().held_bytes().unwrap(), 0);
                fixture.wake().unwrap();
            }
            assert!(fixture.has(9), "call {at} of a wake");
            fixture.check_books();
            if calls_of_park < at && calls_of_wake < at {
                break;
            }
        }
    }
    assert!(failures > 30, "{failures}");
}

#[test]
fn an_interruption_changes_nothing() {
    let fixture = Fixture::new();
    fixture.fill(10);
    for after in 0..3 {
        let mut asked = 0;
        let mut stop = || {
            asked += 1;
            asked > after
        };
        let stopped = fixture.parking().park(Some(PIECE_BYTES), &mut stop);
        assert_eq!(stopped, Err(ParkError::Interrupted));
        assert!(fixture.has(10));
        fixture.check_books();
    }
    fixture.park(PIECE_BYTES).unwrap();
    let stopped = fixture.parking().wake(&mut || true);
    assert_eq!(stopped, Err(ParkError::Interrupted));
    fixture.check_books();
    fixture.wake().unwrap();
    assert!(fixture.has(10));
}

#[test]
fn a_model_that_was_given_up_is_awake_and_not_parkable() {
    let fixture = Fixture::new();
    fixture.fill(11);
    fixture.park(0).unwrap();
    fixture.parking().give_up(&mut || false).unwrap();
    assert!(fixture.has(11));
    assert_eq!(fixture.park(0), Err(ParkError::GivenUp));
    assert!(fixture.has(11));
}

#[test]
fn only_a_range_of_the_memory_is_lent_and_it_holds_the_memory() {
    let driver = StandIn::new();
    let folder = tempfile::tempdir().unwrap();
    let device = driver.device().unwrap();
    let parking = Arc::new(CudaParking::new(device, LENGTH, folder.path(), true).unwrap());
    for (start, length) in [(0, LENGTH + parking.length()), (u64::MAX, 2)] {
        let error = CudaParking::lend(&parking, start, length).unwrap_err();
        assert_eq!(error, ParkError::Range { start, length });
        assert_eq!(error.reason(), "layout");
    }
    let tensor = CudaParking::lend(&parking, 1, 2).unwrap();
    assert_eq!(Arc::strong_count(&parking), 2);
    #[expect(unsafe_code, reason = "lets a tensor go")]
    // SAFETY: it was lent above, and is let go once.
    unsafe {
        ManagedTensor::let_go(tensor);
    }
    assert_eq!(Arc::strong_count(&parking), 1);
}
