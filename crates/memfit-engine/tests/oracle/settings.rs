//! Configurations, good and bad: both sides accept the same ones, read the same values and refuse the
//! others in the same words.

use memfit_engine::allocator::{Device, Settings};

use crate::real::oracle_or_skip;

const TEXTS: &[&str] = &[
    "",
    " ",
    ",",
    ":",
    "foo",
    "foo:1",
    "foo,bar",
    "expandable_segments",
    "expandable_segments:",
    "expandable_segments:True",
    "expandable_segments:False",
    "expandable_segments:true",
    "expandable_segments:[True]",
    "expandable_segments,True",
    "expandable_segments:True,foo",
    "expandable_segments:True,,:",
    "expandable_segments:True max_split_size_mb:20",
    "expandable_segments_handle_type:posix_fd",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_split_size_mb:10",
    "max_split_size_mb:abc",
    "max_split_size_mb:-1",
    "max_split_size_mb:1e3",
    "max_split_size_mb:20xyz",
    "max_split_size_mb: 2 5",
    "max_split_size_mb:99999999999999999999999",
    "max_split_size_mb:18446744073709551615",
    "max_split_size_mb:1,garbage_collection_threshold:9",
    "garbage_collection_threshold:9,max_split_size_mb:1",
    "max_non_split_rounding_mb:3",
    "max_non_split_rounding_mb:30",
    "large_segment_size_mb:5",
    "large_segment_size_mb:10",
    "large_segment_size_mb:11",
    "large_segment_size_mb:99999999999999",
    "large_segment_size_mb:x,foo:1",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "max_split_size_mb:1,large_segment_size_mb:1",
    "garbage_collection_threshold:9,large_segment_size_mb:1",
    "large_segment_size_mb:15,max_split_size_mb:16",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:.5x",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:x",
    "garbage_collection_threshold:nan",
    "roundup_power2_divisions",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[16:0]",
    "roundup_power2_divisions:[1:3]",
    "roundup_power2_divisions:[3:2]",
    "roundup_power2_divisions:[a:4]",
    "roundup_power2_divisions:[4:2,1:8,>:16]",
    "roundup_power2_divisions:[256:1,512:2",
    "roundup_power2_divisions:[256:1,512:2]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:1;512:2]",
    "backend:native",
    "backend:foo",
    "backend:native,max_split_size_mb",
    "pinned_num_register_threads:3",
    "pinned_num_register_threads:8",
    "pinned_num_register_threads:256",
    "pinned_reserve_segment_size_mb:0",
    "pinned_use_background_threads:1",
    "pinned_max_round_threshold_mb:3",
    "pinned_max_cached_size_mb:99999999999999999",
    "per_process_memory_fraction:2",
    "per_process_memory_fraction:0.25",
    "per_process_memory_fraction:40G",
    "per_process_memory_fraction:1G",
    "per_process_memory_fraction:G",
    "per_process_memory_fraction:inf",
    "per_process_memory_fraction:1e-400",
    "expandable_segments_reserve:0.5",
    "expandable_segments_reserve:x",
    "expandable_segments_reserve_by_class:x",
    "expandable_segments_reserve_by_class:[a:0.5",
    "expandable_segments_reserve_by_class:[a:0.5,b:x,c:2G]",
    "graph_capture_record_stream_reuse:1",
    "release_lock_on_hipmalloc:True",
    "throw_on_cudamalloc_oom:maybe",
];

#[test]
fn configurations_are_read_and_refused_alike() {
    let Some(oracle) = oracle_or_skip() else {
        return;
    };
    for text in TEXTS {
        let real = oracle.run(text, Device::new(1 << 30), "d\n");
        match Settings::parse(text) {
            Ok(settings) => assert_eq!(real, describe(&settings), "`{text}`"),
            Err(error) => {
                // An internal assertion puts a file and a line of PyTorch's in front.
                let real = real.lines().next().unwrap_or_default();
                let words = real.rsplit("report a bug to PyTorch. ").next().unwrap();
                let words = words.strip_prefix("error ").unwrap_or(words);
                let ours = error.to_string();
                assert!(
                    !words.is_empty() && ours.starts_with(words),
                    "`{text}`: PyTorch says `{real}`, memfit says `{ours}`"
                );
            }
        }
    }
}

/// As the driver program describes the configuration of the real allocator.
fn describe(settings: &Settings) -> String {
    let divisions: Vec<String> = settings
        .roundup_power2_divisions
        .iter()
        .map(u64::to_string)
        .collect();
    format!(
        "{} {} {} {} {} {} {} {}\n",
        settings.large_segment_bytes,
        settings.max_split_bytes,
        settings.max_non_split_rounding_bytes,
        settings.garbage_collection_threshold,
        u8::from(settings.expandable_segments),
        settings.per_process_memory_fraction,
        settings.pinned_num_register_threads,
        divisions.join(",")
    )
}
