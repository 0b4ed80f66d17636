//! How many bytes a request becomes: its block, and the segment that is taken for it.
//!
//! The rules are those of `c10/core/AllocatorConfig.h` and of `round_size` and
//! `get_allocation_size` in `c10/cuda/CUDACachingAllocator.cpp`.

use super::Settings;

pub use super::sizes::{
    DIVISION_INTERVALS, LARGE_GRANULE_BYTES, LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES, MIN_LARGE_BYTES,
    SMALL_BYTES, SMALL_SEGMENT_BYTES,
};

/// The bytes of the block that serves a request.
///
/// A request that no `u64` can round up saturates; PyTorch's own arithmetic wraps around there.
#[must_use]
pub fn block_bytes(settings: &Settings, requested: u64) -> u64 {
    if requested < MIN_BLOCK_BYTES {
        return MIN_BLOCK_BYTES;
    }
    let divisions = settings.roundup_power2_divisions[division_interval(requested)];
    if divisions > 1 && requested > MIN_BLOCK_BYTES.saturating_mul(divisions) {
        next_division(requested, divisions)
    } else {
        round_up(requested, MIN_BLOCK_BYTES)
    }
}

/// The bytes of the segment that is taken when no cached block serves a block of these bytes.
#[must_use]
pub fn segment_bytes(settings: &Settings, block_bytes: u64) -> u64 {
    if block_bytes <= SMALL_BYTES {
        SMALL_SEGMENT_BYTES
    } else if block_bytes < MIN_LARGE_BYTES {
        settings.large_segment_bytes
    } else {
        round_up(block_bytes, LARGE_GRANULE_BYTES)
    }
}

/// The slot of `roundup_power2_divisions` for a size: 0 below 2 MiB, 15 from 32 GiB on.
fn division_interval(bytes: u64) -> usize {
    let log = bytes.max(1).ilog2() as usize;
    log.saturating_sub(SMALL_BYTES.ilog2() as usize)
        .min(DIVISION_INTERVALS - 1)
}

/// The next of `divisions` equal steps between two powers of two.
fn next_division(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1_u64 << bytes.ilog2();
    let step = floor.checked_shr(divisions.ilog2()).unwrap_or(0);
    if step == 0 {
        return floor.saturating_mul(2);
    }
    round_up(bytes, step)
}

fn round_up(bytes: u64, granule: u64) -> u64 {
    bytes
        .checked_next_multiple_of(granule)
        .unwrap_or(u64::MAX - u64::MAX % MIN_BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn requests_become_the_blocks_and_segments_of_the_binary() {
        let settings = Settings::default();
        // Request, block, segment, as `libc10_cuda.so` of torch 2.15 answered.
        for (requested, block, segment) in [
            (1, 512, 2 * MIB),
            (513, 1024, 2 * MIB),
            (MIB, MIB, 2 * MIB),
            (MIB + 1, 1_049_088, 20 * MIB),
            (5_000_000, 5_000_192, 20 * MIB),
            (10 * MIB, 10 * MIB, 10 * MIB),
            (10 * MIB + 1, 10_486_272, 12 * MIB),
            (33_554_433, 33_554_944, 34 * MIB),
        ] {
            assert_eq!(block_bytes(&settings, requested), block, "{requested}");
            assert_eq!(segment_bytes(&settings, block), segment, "{requested}");
        }
    }

    #[test]
    fn divisions_round_to_parts_of_a_power_of_two() {
        let settings = Settings::parse("roundup_power2_divisions:4").unwrap();
        for (requested, block) in [
            (MIB + 1, 1_310_720),
            (5_000_000, 5_242_880),
            (10 * MIB + 1, 12 * MIB),
            (33_554_433, 40 * MIB),
            (100 * MIB, 112 * MIB),
            (2048, 2048),
            (2049, 2560),
        ] {
            assert_eq!(block_bytes(&settings, requested), block, "{requested}");
        }
    }

    #[test]
    fn no_request_overflows() {
        for settings in [
            Settings::default(),
            Settings::parse("roundup_power2_divisions:2").unwrap(),
        ] {
            for requested in [0, u64::MAX - 511, u64::MAX, 1 << 63, (1 << 63) + 1] {
                let block = block_bytes(&settings, requested);
                assert!(block >= requested.min(u64::MAX - 511));
                assert!(segment_bytes(&settings, block) > 0);
            }
        }
    }
}
