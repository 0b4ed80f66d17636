//! The combinations of settings and devices that are compared, and differences once found.

use memfit_engine::allocator::{AddressOrder, Device};

use crate::random::Mix;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// One combination.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) settings: &'static str,
    pub(crate) device: Device,
    pub(crate) mix: Mix,
}

/// Handles whose order in PyTorch's hash table is their order as numbers, at every size of the table.
const STREAMS: &[u64] = &[0, 0x60, 0xc0, 0x130];

const fn device(total_bytes: u64, address_order: AddressOrder) -> Device {
    Device {
        total_bytes,
        other_bytes: 0,
        address_order,
    }
}

/// Enough memory for everything.
const ROOMY: Device = device(16 * GIB, AddressOrder::Ascending);
/// So little that requests are refused.
const TIGHT: Device = device(768 * MIB, AddressOrder::Descending);

const PLAIN: Mix = Mix {
    live_bytes: 2 * GIB,
    largest_bytes: 512 * MIB,
    streams: &[0],
    has_events: false,
    has_pools: false,
    releases_pools: true,
    has_pressure: false,
    settings: &[],
};
const PRESSED: Mix = Mix {
    live_bytes: 700 * MIB,
    largest_bytes: 200 * MIB,
    has_pressure: true,
    ..PLAIN
};
const STREAMED: Mix = Mix {
    streams: STREAMS,
    has_events: true,
    ..PRESSED
};
const POOLED: Mix = Mix {
    has_pools: true,
    ..PRESSED
};

const EVERYTHING: Mix = Mix {
    has_pools: true,
    ..STREAMED
};

const fn case(name: &'static str, settings: &'static str, device: Device, mix: Mix) -> Case {
    Case {
        name,
        settings,
        device,
        mix,
    }
}

pub(crate) const CASES: &[Case] = &[
    case("default", "", ROOMY, PLAIN),
    case("default, tight", "", TIGHT, PRESSED),
    case("default, streams", "", ROOMY, STREAMED),
    case("default, streams, tight", "", TIGHT, STREAMED),
    case("default, pools", "", ROOMY, POOLED),
    case("default, pools, tight", "", TIGHT, POOLED),
    case("all at once", "", TIGHT, EVERYTHING),
    case("expandable", "expandable_segments:True", ROOMY, PLAIN),
    case(
        "expandable, tight",
        "expandable_segments:True",
        TIGHT,
        PRESSED,
    ),
    case(
        "expandable, streams",
        "expandable_segments:True",
        TIGHT,
        STREAMED,
    ),
    case(
        "expandable, small reserve",
        "expandable_segments:True,expandable_segments_reserve:0.2",
        TIGHT,
        PRESSED,
    ),
    case(
        "expandable, reserve in GiB",
        "expandable_segments:True,expandable_segments_reserve:1G",
        ROOMY,
        STREAMED,
    ),
    case(
        "expandable on and off",
        "expandable_segments:True",
        TIGHT,
        Mix {
            settings: &[
                "expandable_segments:True",
                "expandable_segments:False",
                "expandable_segments:True,garbage_collection_threshold:0.4",
                "expandable_segments:False,roundup_power2_divisions:4",
            ],
            ..STREAMED
        },
    ),
    case("divisions", "roundup_power2_divisions:4", ROOMY, PLAIN),
    case("divisions, 1", "roundup_power2_divisions:1", TIGHT, PRESSED),
    case(
        "divisions, 16",
        "roundup_power2_divisions:16",
        TIGHT,
        STREAMED,
    ),
    case(
        "divisions by interval",
        "roundup_power2_divisions:[2:8,4:0,16:2,64:32,>:4]",
        TIGHT,
        PRESSED,
    ),
    case(
        "divisions, expandable",
        "roundup_power2_divisions:[1:2,32:4,>:8],expandable_segments:True",
        TIGHT,
        STREAMED,
    ),
    case("split limit", "max_split_size_mb:20", ROOMY, PRESSED),
    case("split limit, tight", "max_split_size_mb:32", TIGHT, PRESSED),
    case(
        "split limit, streams",
        "max_split_size_mb:64",
        TIGHT,
        STREAMED,
    ),
    case(
        "split limit, rounding",
        "max_split_size_mb:24,max_non_split_rounding_mb:64",
        TIGHT,
        PRESSED,
    ),
    case(
        "split limit, expandable",
        "max_split_size_mb:20,expandable_segments:True",
        TIGHT,
        STREAMED,
    ),
    case(
        "garbage",
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
        TIGHT,
        PRESSED,
    ),
    case(
        "garbage, roomy",
        "garbage_collection_threshold:0.1,per_process_memory_fraction:0.5",
        ROOMY,
        PRESSED,
    ),
    case(
        "garbage, streams, split limit",
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.7,max_split_size_mb:40",
        TIGHT,
        STREAMED,
    ),
    case(
        "garbage, expandable",
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8,expandable_segments:True",
        TIGHT,
        STREAMED,
    ),
    case(
        "fraction",
        "per_process_memory_fraction:0.61",
        TIGHT,
        PRESSED,
    ),
    case("rejection", "throw_on_cudamalloc_oom:True", TIGHT, PRESSED),
    case(
        "rejection, fraction",
        "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.7",
        TIGHT,
        STREAMED,
    ),
    case(
        "rejection, expandable",
        "throw_on_cudamalloc_oom:True,expandable_segments:True",
        TIGHT,
        PRESSED,
    ),
    case(
        "large segments",
        "large_segment_size_mb:64",
        ROOMY,
        STREAMED,
    ),
    case(
        "small large segments",
        "large_segment_size_mb:11",
        TIGHT,
        PRESSED,
    ),
    case(
        "large segments, split limit",
        "large_segment_size_mb:40,max_split_size_mb:50",
        TIGHT,
        PRESSED,
    ),
    case(
        "large segments, expandable",
        "large_segment_size_mb:32,expandable_segments:True",
        TIGHT,
        STREAMED,
    ),
    case(
        "pools, split limit, garbage",
        "max_split_size_mb:30,garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
        TIGHT,
        EVERYTHING,
    ),
    case(
        "pools, divisions, rejection",
        "roundup_power2_divisions:8,throw_on_cudamalloc_oom:True",
        TIGHT,
        POOLED,
    ),
    case(
        "pools, expandable",
        "expandable_segments:True",
        TIGHT,
        Mix {
            releases_pools: false,
            ..POOLED
        },
    ),
    case(
        "pools, expandable, streams",
        "expandable_segments:True",
        ROOMY,
        Mix {
            releases_pools: false,
            ..EVERYTHING
        },
    ),
];
