//! What the caching allocator takes from the device for a step.
//!
//! Responsible for feeding the lives of a step to the simulated allocator until a further step takes no
//! more, and for the figures that come out: peak reserved, what of it is fragmentation, and whether the
//! step runs at all under a cap. Not responsible for the lives ([`crate::step::lives`]) nor for the allocator
//! ([`crate::allocator`]).
//!
//! One stream is simulated: an eager step runs on one.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::allocator::{BlockId, Device, FreeOrder, OutOfMemory, Settings, Simulator};
use crate::bytes::Bytes;
use crate::step::lives::Life;
use crate::trace::{Category, Trace};

/// What the allocator is predicted to hold.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Reserved {
    /// Peak of bytes taken from the device under the settings of `settings`.
    pub peak_reserved_bytes: Bytes,
    /// Peak of bytes in blocks handed out: requests, rounded.
    pub peak_allocated_bytes: Bytes,
    /// Taken from the device and not handed out, at the moment of most allocated bytes in the last step.
    pub fragmentation_bytes: Bytes,
    /// `PYTORCH_CUDA_ALLOC_CONF`; empty for PyTorch's defaults.
    pub settings: String,
    /// Steps simulated until the allocator took no more from the device.
    pub steps: u32,
}

/// No more steps than this are simulated.
const MOST_STEPS: u32 = 6;
/// A device that never refuses.
const UNLIMITED: Bytes = Bytes(1 << 50);

/// The settings that let segments grow in place, which nearly ends fragmentation.
pub const EXPANDABLE: &str = "expandable_segments:True";

/// One step as requests in order.
#[derive(Debug)]
pub struct Requests<'l> {
    lives: &'l [Life],
    /// Life and whether it comes, in order; what is there before the step first.
    turns: Vec<(usize, bool)>,
    /// For what is there before the step and goes within it: what an earlier step left in its place.
    left_by: BTreeMap<usize, usize>,
    /// What a step leaves behind and the next one does not look for.
    strays: Vec<usize>,
}

impl<'l> Requests<'l> {
    /// The requests of a step.
    ///
    /// What a step leaves behind and did not find (new gradients, say) stands in the next step for what
    /// that finds and frees, matched by category and size; what matches nothing goes when the step ends.
    #[must_use]
    pub fn new(trace: &Trace, lives: &'l [Life]) -> Self {
        let mut turns: Vec<(u32, bool, usize)> = Vec::with_capacity(2 * lives.len());
        let mut left: BTreeMap<(Option<Category>, Bytes), Vec<usize>> = BTreeMap::new();
        let key = |life: &Life| {
            let category = life
                .allocation
                .map(|id| trace.allocations[id.index()].category);
            (category, life.bytes)
        };
        for (i, life) in lives.iter().enumerate().rev() {
            turns.push((life.start, true, i));
            if life.end != u32::MAX {
                turns.push((life.end, false, i));
            } else if !life.is_resident {
                left.entry(key(life)).or_default().push(i);
            }
        }
        turns.sort_unstable();
        let mut left_by = BTreeMap::new();
        for (i, life) in lives.iter().enumerate() {
            if life.is_resident
                && life.end != u32::MAX
                && let Some(leaver) = left.get_mut(&key(life)).and_then(Vec::pop)
            {
                left_by.insert(i, leaver);
            }
        }
        Self {
            lives,
            turns: turns.into_iter().map(|(_, comes, i)| (i, comes)).collect(),
            left_by,
            strays: left.into_values().flatten().collect(),
        }
    }

    /// What the allocator takes on a device that never refuses.
    #[must_use]
    pub fn reserved(&self, settings: &Settings, written: &str) -> Reserved {
        let run = self.run(settings, UNLIMITED);
        Reserved {
            peak_reserved_bytes: run.peak_reserved,
            peak_allocated_bytes: run.peak_allocated,
            fragmentation_bytes: run.fragmentation,
            settings: written.to_owned(),
            steps: run.steps,
        }
    }

    /// Whether no request is refused on a device with `cap` bytes, cached blocks being given back when it
    /// is full. The error is the first request refused.
    ///
    /// # Errors
    ///
    /// The first request that is refused.
    pub fn within(&self, settings: &Settings, cap: Bytes) -> Result<(), OutOfMemory> {
        self.run(settings, cap).refused.map_or(Ok(()), Err)
    }

    fn run(&self, settings: &Settings, device: Bytes) -> Run {
        let device = Device::new(device.0);
        let mut simulator = Simulator::new(settings, FreeOrder::SegmentCounter, device);
        let mut blocks: Vec<Option<BlockId>> = vec![None; self.lives.len()];
        let mut run = Run::default();
        while run.steps < MOST_STEPS {
            let before = run.peak_reserved;
            if let Err(refused) = self.step(&mut simulator, &mut blocks, &mut run) {
                run.refused = Some(refused);
                break;
            }
            run.steps += 1;
            if run.peak_reserved == before {
                break;
            }
        }
        run
    }

    /// One step; what it finds from the step before is in `blocks`.
    fn step(
        &self,
        simulator: &mut Simulator,
        blocks: &mut [Option<BlockId>],
        run: &mut Run,
    ) -> Result<(), OutOfMemory> {
        let mut most_active = 0;
        for (&found, &leaver) in &self.left_by {
            blocks[found] = blocks[leaver].take();
        }
        for &(life, comes) in &self.turns {
            if comes {
                if blocks[life].is_none() {
                    blocks[life] = Some(simulator.malloc(self.lives[life].bytes.0, 0)?);
                }
            } else if let Some(block) = blocks[life].take() {
                simulator.free(block);
            }
            let now = simulator.statistics();
            let active = now.active_bytes.all.current;
            if active > most_active {
                most_active = active;
                run.fragmentation = Bytes(now.reserved_bytes.all.current) - Bytes(active);
            }
        }
        for &life in &self.strays {
            if let Some(block) = blocks[life].take() {
                simulator.free(block);
            }
        }
        let now = simulator.statistics();
        run.peak_reserved = Bytes(now.reserved_bytes.all.peak);
        run.peak_allocated = Bytes(now.allocated_bytes.all.peak);
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Run {
    peak_reserved: Bytes,
    peak_allocated: Bytes,
    fragmentation: Bytes,
    steps: u32,
    refused: Option<OutOfMemory>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::lives::{highest, lives};
    use crate::step::{StepModel, Treatment, Variant};
    use crate::trace::sample;

    const MIB: u64 = 1 << 20;

    fn life(bytes: u64, start: u32, end: u32) -> Life {
        Life {
            allocation: None,
            bytes: Bytes(bytes),
            start,
            end,
            is_resident: false,
        }
    }

    fn of(lives: &[Life], settings: &str) -> Reserved {
        let trace = sample::chain();
        let parsed = Settings::parse(settings).unwrap();
        Requests::new(&trace, lives).reserved(&parsed, settings)
    }

    #[test]
    fn small_requests_share_one_segment() {
        let reserved = of(&[life(100, 0, 3), life(600, 1, 2)], "");
        assert_eq!(reserved.peak_allocated_bytes, Bytes(512 + 1024));
        assert_eq!(reserved.peak_reserved_bytes, Bytes(2 * MIB));
        assert_eq!(reserved.fragmentation_bytes, Bytes(2 * MIB - 512 - 1024));
    }

    #[test]
    fn a_segment_too_small_costs_another_unless_segments_grow() {
        let lives = [life(30 * MIB, 0, 1), life(40 * MIB, 2, 3)];
        assert_eq!(of(&lives, "").peak_reserved_bytes, Bytes(70 * MIB));
        assert_eq!(of(&lives, EXPANDABLE).peak_reserved_bytes, Bytes(40 * MIB));
    }

    #[test]
    fn a_cap_between_the_live_bytes_and_what_is_reserved_is_met_by_giving_back() {
        let trace = sample::chain();
        let lives = [
            life(30 * MIB, 0, 2),
            life(12 * MIB, 1, u32::MAX),
            life(40 * MIB, 3, 4),
        ];
        let requests = Requests::new(&trace, &lives);
        let within = |mib: u64| requests.within(&Settings::default(), Bytes(mib * MIB));
        assert!(within(82).is_ok());
        assert!(
            within(52).is_ok(),
            "the free segment of 30 MiB is given back"
        );
        assert!(within(50).is_err());
    }

    #[test]
    fn what_a_step_leaves_is_what_the_next_one_finds() {
        // A gradient: there before the step, freed in it, made anew, and left.
        let trace = sample::chain();
        let mut found = life(30 * MIB, 0, 1);
        found.is_resident = true;
        let lives = [found, life(30 * MIB, 2, u32::MAX)];
        let reserved = Requests::new(&trace, &lives).reserved(&Settings::default(), "");
        assert_eq!(reserved.peak_reserved_bytes, Bytes(30 * MIB));
        assert_eq!(reserved.steps, 2);
    }

    #[test]
    fn allocated_is_at_least_what_is_requested() {
        for trace in [sample::chain(), sample::batched_chain(4)] {
            let model = StepModel::new(&trace, Variant::default());
            let lives = lives(
                &trace,
                &model,
                &vec![Treatment::Keep; trace.allocations.len()],
            );
            let reserved = Requests::new(&trace, &lives).reserved(&Settings::default(), "");
            assert!(reserved.peak_allocated_bytes >= highest(&lives));
            assert!(reserved.peak_reserved_bytes >= reserved.peak_allocated_bytes);
        }
    }
}
