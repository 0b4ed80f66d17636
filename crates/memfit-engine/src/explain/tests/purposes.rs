//! What blocks are for, by the stack that asked for them.

use super::*;

/// A checkpoint that is loaded next to its model, and KV caches, which libraries fill in different files.
#[test]
fn what_is_read_from_a_file_and_what_is_a_cache_is_told_by_the_stack() {
    for (frames, wanted) in [
        (
            &[
                "/x/torch/serialization.py:1980 restore_location",
                "infer.py:8 main",
            ][..],
            Category::Checkpoint,
        ),
        (
            &["/x/safetensors/torch.py:383 load_file", "serve.py:12 main"],
            Category::Checkpoint,
        ),
        (
            &[
                "/x/transformers/core_model_loading.py:7 _materialize",
                "serve.py:2 main",
            ],
            Category::Checkpoint,
        ),
        (
            &[
                "weight_utils.py:440 safetensors_weights_iterator",
                "model_runner.py:900 load_model",
            ],
            Category::Checkpoint,
        ),
        (
            &["cache.py:18 allocate_kv_cache", "engine.py:77 run"],
            Category::KvCache,
        ),
        (
            &["serving.py:18 allocate", "engine.py:77 run"],
            Category::Unknown,
        ),
    ] {
        let mut machine = Machine::new();
        let stack = machine.stack(frames);
        machine.malloc(64 * MIB, 0, stack);
        let device = machine.explained(0);
        let found: Vec<_> = device.owners.iter().map(|row| row.category).collect();
        assert_eq!(found, [wanted], "{frames:?}");
    }
}
