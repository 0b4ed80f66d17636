//! Random histories of several models on one device, against a twin that keeps each model's bytes in a
//! vector and knows of the device only how much it has.

use std::sync::Arc;

use proptest::prelude::*;

use super::CudaParking;
use super::copy::PIECE_BYTES;
use crate::arena::cuda::stand_in::{Counts, StandIn};

const MIB: u64 = 1 << 20;
/// Room for two or three models.
const DEVICE_BYTES: u64 = 12 * MIB;
const MOST_MODELS: usize = 4;

#[derive(Debug, Clone)]
enum Event {
    Add(u64),
    Write(usize, u64, u8),
    Park(usize, u64),
    ToDisk(usize),
    Wake(usize),
    Drop(usize),
    /// The call of that number from now on fails.
    Fail(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let which = 0..MOST_MODELS;
    prop_oneof![
        2 => (1..8 * MIB).prop_map(Event::Add),
        4 => (which.clone(), any::<u64>(), any::<u8>()).prop_map(|(a, b, c)| Event::Write(a, b, c)),
        4 => (which.clone(), 0..3 * PIECE_BYTES).prop_map(|(a, b)| Event::Park(a, b)),
        1 => which.clone().prop_map(Event::ToDisk),
        4 => which.clone().prop_map(Event::Wake),
        1 => which.prop_map(Event::Drop),
        1 => (1..40_u64).prop_map(Event::Fail),
    ]
}

/// A model, and what the twin knows of it.
struct Model {
    parking: CudaParking,
    bytes: Vec<u8>,
    is_parked: bool,
}

impl Model {
    fn has_its_bytes(&self) -> bool {
        let mut found = vec![0; self.bytes.len()];
        let state = self.parking.lock_here().unwrap();
        state.arena.copy_out(0, &mut found).is_ok() && found == self.bytes
    }
}

struct World {
    driver: StandIn,
    device: Arc<crate::arena::cuda::Device>,
    folder: tempfile::TempDir,
    models: Vec<Model>,
    /// Whether a call may fail that would not fail in the twin.
    is_broken: bool,
}

impl World {
    fn new() -> Self {
        let driver = StandIn::new();
        driver.set(usize::try_from(DEVICE_BYTES).unwrap(), usize::MAX, false);
        Self {
            device: driver.device().unwrap(),
            driver,
            folder: tempfile::tempdir().unwrap(),
            models: Vec::new(),
            is_broken: false,
        }
    }

    /// Bytes that the device has for one more model, or for one that is parked.
    fn free_bytes(&self) -> u64 {
        DEVICE_BYTES - self.driver.counts().used_bytes
    }

    /// A success is one in the twin, and so is a failure unless calls are made to fail.
    fn judge(&self, succeeds: bool, in_twin: bool) {
        assert!(
            succeeds == in_twin || (self.is_broken && !succeeds),
            "{succeeds} {in_twin}"
        );
    }

    fn apply(&mut self, event: &Event) {
        match *event {
            Event::Add(length) if self.models.len() < MOST_MODELS => self.add(length),
            Event::Write(which, at, value) if which < self.models.len() => {
                self.write(which, at, value);
            }
            Event::Park(which, host_bytes) if which < self.models.len() => {
                let model = &self.models[which];
                let parked = model.parking.park(Some(host_bytes), &mut || false);
                self.judge(parked.is_ok(), true);
                self.models[which].is_parked |= parked.is_ok();
            }
            Event::ToDisk(which) if which < self.models.len() => {
                let moved = self.models[which].parking.to_disk(&mut || false);
                self.judge(moved.is_ok(), true);
            }
            Event::Wake(which) if which < self.models.len() => {
                let model = &self.models[which];
                let missing = model.parking.length() - model.parking.held_bytes().unwrap();
                let has_room = !model.is_parked || missing <= self.free_bytes();
                let woken = model.parking.wake(&mut || false);
                self.judge(woken.is_ok(), has_room);
                self.models[which].is_parked &= woken.is_err();
            }
            Event::Drop(which) if which < self.models.len() => {
                self.repair();
                self.models.remove(which);
            }
            Event::Fail(at) => {
                self.driver.fail(at, false, 999);
                self.is_broken = true;
            }
            _ => {}
        }
    }

    fn add(&mut self, length: u64) {
        let has_room = length.next_multiple_of(2 * MIB) <= self.free_bytes();
        let device = Arc::clone(&self.device);
        let made = CudaParking::new(device, length, self.folder.path(), true);
        let made = made.and_then(|parking| parking.open_to(length).map(|()| parking));
        self.judge(made.is_ok(), has_room);
        let Ok(parking) = made else { return };
        let bytes = vec![0; usize::try_from(length).unwrap()];
        self.repair();
        let mut state = parking.lock_here().unwrap();
        state.arena.copy_in(0, &bytes).unwrap();
        drop(state);
        self.models.push(Model {
            parking,
            bytes,
            is_parked: false,
        });
    }

    fn write(&mut self, which: usize, at: u64, value: u8) {
        let model = &mut self.models[which];
        if model.is_parked {
            return;
        }
        let at = at % model.bytes.len() as u64;
        let mut state = model.parking.lock_here().unwrap();
        if state.arena.copy_in(at, &[value]).is_ok() {
            model.bytes[usize::try_from(at).unwrap()] = value;
        }
    }

    fn repair(&mut self) {
        self.driver.fail(0, false, 0);
        self.is_broken = false;
    }

    /// What holds after every event. Looking at bytes makes calls too, so only where none is to fail.
    fn check(&self) {
        let counts = self.driver.counts();
        let held = self.models.iter().map(|model| model.parking.held_bytes());
        assert_eq!(counts.used_bytes, held.map(Result::unwrap).sum::<u64>());
        assert_eq!(counts.misuses, 0);
        for model in &self.models {
            assert_eq!(model.parking.is_parked(), model.is_parked);
            assert!(self.is_broken || model.is_parked || model.has_its_bytes());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn histories_are_those_of_a_simple_twin(events in prop::collection::vec(event(), 1..30)) {
        let mut world = World::new();
        for event in &events {
            world.apply(event);
            world.check();
        }
        world.repair();
        while let Some(model) = world.models.pop() {
            // Alone, each has room.
            for other in &world.models {
                other.parking.park(Some(0), &mut || false).unwrap();
            }
            model.parking.wake(&mut || false).unwrap();
            prop_assert!(model.has_its_bytes());
        }
        let World { driver, device, .. } = world;
        drop(device);
        prop_assert_eq!(driver.counts().held(), Counts::default());
    }
}
