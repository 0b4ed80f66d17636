//! Programs that load, fill caches, capture graphs, churn and refuse, each fixed by its seed.
//!
//! Responsible for programs that are no loops of steps, and for the device they run on. Not responsible for
//! training loops (`steps.rs`). None of these programs leaks: a leak named in one of them is a false cause.

use super::program::{MIB, Place, Program, Random, Stacks};
use super::steps;
use crate::allocator::{AddressOrder, BlockId, Device, FreeOrder};

const MODULE: &str = "/x/torch/nn/modules/module.py:1790 _call_impl";
/// Larger than any program here.
const ROOMY_BYTES: u64 = 1 << 40;
/// A program that runs until it is refused is refused long before.
const MAX_ROUNDS: usize = 300;

/// A program with its name.
type Kind = (&'static str, fn(&mut Program));

/// All programs. Most are loops: there is most to confuse.
const KINDS: [Kind; 13] = [
    ("load", load),
    ("caches", caches),
    ("decode", decode),
    ("graphs", graphs),
    ("quantize", quantize),
    ("churn", churn),
    ("late", late),
    ("train", steps::train),
    ("train", steps::train),
    ("train", steps::train),
    ("train", steps::train),
    ("infer", steps::infer),
    ("infer", steps::infer),
];

/// Runs the program of a seed for at most so many operations.
pub(super) fn run(seed: u64, limit: usize) -> (&'static str, Program) {
    let mut random = Random(seed);
    let (name, run) = of(&mut random, &KINDS);
    let is_tight = random.below(3) == 0;
    let place = place(&mut random, is_tight);
    let mut program = Program::new(random, place, limit);
    if program.one_in(3) {
        load(&mut program);
    }
    run(&mut program);
    if is_tight {
        exhaust(&mut program);
    }
    (name, program)
}

/// A device that ends nowhere, or one whose end is near: by its size, by others, or by a limit.
fn place(random: &mut Random, is_tight: bool) -> Place {
    let room = (300 + random.below(2500)) * MIB;
    // A context takes no more of a small device.
    let context_bytes = (150 + random.below(500)).min(room / MIB / 8) * MIB;
    let (total, others, fraction) = match random.below(3) {
        _ if !is_tight => (ROOMY_BYTES, 0, None),
        0 => (room + context_bytes, 0, None),
        1 => {
            let others = (1 + random.below(20_000)) * MIB;
            (room + context_bytes + others, others, None)
        }
        _ => {
            // A device that is full as well hides its limit: that is not told apart.
            let total = 2 * room + context_bytes + (64 << 30);
            #[expect(clippy::cast_precision_loss, reason = "a share")]
            let share = room as f64 / total as f64;
            (total, 0, Some(share))
        }
    };
    let settings = [
        "",
        "",
        "",
        "expandable_segments:True",
        "max_split_size_mb:64",
        "roundup_power2_divisions:4",
    ];
    let stacks = [Stacks::All, Stacks::All, Stacks::Python, Stacks::None];
    let orders = [FreeOrder::SegmentCounter, FreeOrder::Address];
    Place {
        device: Device {
            total_bytes: total,
            other_bytes: context_bytes + others,
            address_order: AddressOrder::Ascending,
        },
        context_bytes,
        settings: of(random, &settings),
        fraction,
        stacks: of(random, &stacks),
        hides_pools: random.below(4) == 0,
        order: of(random, &orders),
    }
}

pub(super) fn of<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    choices[usize::try_from(random.below(choices.len() as u64)).unwrap()]
}

impl Program {
    pub(super) fn one_in(&mut self, count: u64) -> bool {
        self.random.below(count) == 0
    }

    /// From `least` on, `count` of them.
    pub(super) fn between(&mut self, least: u64, count: u64) -> u64 {
        least + self.random.below(count)
    }
}

/// Weights, layer by layer, often through a copy that is dropped.
fn load(it: &mut Program) {
    let read = [
        "/x/safetensors/torch.py:383 load_file",
        "load.py:4 read",
        "/x/torch/serialization.py:1980 restore_location",
    ];
    let read = of(&mut it.random, &read);
    let read = it.stack(&[read, "serve.py:3 main"]);
    let moved = ["load.py:9 place", "/x/torch/nn/modules/module.py:1 _apply"];
    let weight = of(&mut it.random, &moved);
    let weight = it.stack(&[weight, "serve.py:4 main"]);
    let check = it.stack(&["model.py:9 forward", MODULE, "serve.py:5 main"]);
    let (has_copy, has_check) = (it.one_in(2), it.one_in(4));
    let mib = it.between(1, 30);
    let mut last = None;
    for _ in 0..it.between(3, 12) {
        let copy = if has_copy {
            it.malloc(mib * 2 * MIB, read)
        } else {
            None
        };
        it.malloc(mib * MIB, weight);
        it.free(copy);
    }
    // A first batch, to see that it works.
    if has_check {
        for _ in 0..4 {
            let next = it.malloc(3 * MIB, check);
            it.free(last);
            last = next;
        }
        it.free(last);
    }
}

/// Keys and values of every layer, made ahead; then requests that use them.
fn caches(it: &mut Program) {
    let keys = it.stack(&["cache.py:18 allocate", "engine.py:77 __init__"]);
    let values = it.stack(&["cache.py:19 allocate", "engine.py:77 __init__"]);
    let layer = it.stack(&["block.py:5 forward", MODULE, "engine.py:90 step"]);
    let token = it.stack(&["engine.py:91 step"]);
    let mib = it.between(4, 20);
    for _ in 0..it.between(4, 28) {
        it.malloc(mib * MIB, keys);
        it.malloc(mib * MIB, values);
    }
    for _ in 0..it.between(0, 10) {
        let bytes = it.between(1, 40) * MIB / 4;
        let scratch = it.malloc(bytes, layer);
        let sampled = it.malloc(512, token);
        it.free(scratch);
        it.free(sampled);
    }
}

/// Tokens one by one: the cache grows with them, in larger blocks or in more of them.
fn decode(it: &mut Program) {
    let files = [
        "model.py:30 attend",
        "/x/transformers/cache_utils.py:99 update",
    ];
    let file = of(&mut it.random, &files);
    let cache = it.stack(&[file, "block.py:6 forward", MODULE, "generate.py:7 main"]);
    let layer = it.stack(&["block.py:5 forward", MODULE, "generate.py:7 main"]);
    let token = it.stack(&["generate.py:8 main"]);
    let is_marked = it.one_in(3);
    let (layers, start, slope) = (it.between(1, 3), it.between(1, 30), it.between(1, 3));
    let mut held: Vec<Option<BlockId>> = (0..layers).map(|_| None).collect();
    for n in 0..it.between(4, 12) {
        if is_marked {
            it.annotate(&format!("ProfilerStep#{n}"), true);
        }
        for place in &mut held {
            let scratch = it.malloc(MIB, layer);
            let larger = it.malloc((start + n * slope) * MIB, cache);
            it.free(place.take());
            *place = larger;
            it.free(scratch);
        }
        let sampled = it.malloc(512, token);
        it.free(sampled);
    }
    if it.one_in(2) {
        it.free_all(held);
    }
}

/// A graph for every batch size, captured into a private pool of its own or one for all; each has inputs that stay.
fn graphs(it: &mut Program) {
    let input = it.stack(&["runner.py:20 capture", "engine.py:3 main"]);
    let layer = it.stack(&["block.py:5 forward", MODULE, "runner.py:22 capture"]);
    let output = it.stack(&["head.py:2 forward", MODULE, "runner.py:22 capture"]);
    let (shares, keeps_inputs) = (it.one_in(2), it.one_in(2));
    let (sizes, mib) = (it.between(1, 9), it.between(4, 24));
    for n in 0..sizes {
        let batch = sizes - n;
        let fixed = it.malloc(batch * MIB, input);
        // Warm-up, outside the pool.
        let scratch = it.malloc(batch * 2 * MIB, layer);
        it.free(scratch);
        it.begin_pool((0, if shares { 1 } else { 1 + n }));
        for _ in 0..3 {
            let scratch = it.malloc(batch * mib * MIB, layer);
            it.malloc(batch * MIB, output);
            it.free(scratch);
        }
        it.end_pool();
        if !keeps_inputs {
            it.free(fixed);
        }
    }
    let eager = it.stack(&["engine.py:50 step"]);
    for _ in 0..it.between(0, 6) {
        let bytes = it.between(1, 60) * MIB;
        let block = it.malloc(bytes, eager);
        if it.one_in(2) {
            it.free(block);
        }
    }
}

/// Layer after layer is run, made smaller, and replaced.
fn quantize(it: &mut Program) {
    let weight = it.stack(&["load.py:9 place", "quantize.py:3 main"]);
    let run = it.stack(&["block.py:5 forward", MODULE, "quantize.py:8 main"]);
    let packed = it.stack(&["quantize.py:9 main"]);
    let mib = it.between(4, 30);
    let layers = it.between(4, 12);
    let full: Vec<_> = (0..layers)
        .map(|_| it.malloc(4 * mib * MIB, weight))
        .collect();
    for layer in full {
        let outputs = it.malloc(mib * MIB, run);
        it.malloc(mib * MIB, packed);
        it.free(layer);
        it.free(outputs);
    }
}

/// Blocks of all sizes that come and go, some used by another stream.
fn churn(it: &mut Program) {
    let stacks: Vec<_> = (0..4)
        .map(|n| it.stack(&[&format!("a.py:{n} f")]))
        .collect();
    let uses_streams = it.one_in(2);
    let mut held = Vec::new();
    for _ in 0..it.between(10, 90) {
        let stack = of(&mut it.random, &stacks);
        let bytes = match it.random.below(4) {
            0 => it.between(1, MIB),
            1 => it.between(MIB, 9 * MIB),
            _ => it.between(9 * MIB, 60 * MIB),
        };
        let stream = if uses_streams && it.one_in(4) { 9 } else { 0 };
        held.push(it.malloc_on(bytes, stream, stack));
        while !held.is_empty() && it.one_in(2) {
            let place = usize::try_from(it.random.below(held.len() as u64)).unwrap();
            let block = held.swap_remove(place);
            if uses_streams && it.one_in(2) {
                it.free_late(block);
            } else {
                it.free(block);
            }
        }
        if it.one_in(30) {
            it.empty_cache();
        }
        if it.one_in(12) {
            it.catch_up();
        }
    }
}

/// A buffer that shares its segment is still read by another stream when its like is asked for and nothing is left.
fn late(it: &mut Program) {
    let stack = it.stack(&["prefetch.py:5 load", "train.py:2 main"]);
    let mib = it.between(80, 120);
    let whole = it.malloc(mib * MIB, stack);
    it.free(whole);
    it.malloc(mib / 6 * MIB, stack);
    let buffer = it.malloc(mib * 3 / 4 * MIB, stack);
    for _ in 0..MAX_ROUNDS {
        if it.left_bytes() < mib / 2 * MIB {
            break;
        }
        let bytes = it.between(20, 15) * MIB;
        it.malloc(bytes, stack);
    }
    it.free_late(buffer);
    it.malloc(512, stack);
    let bytes = it.between(mib / 2, mib / 5) * MIB;
    it.malloc(bytes, stack);
}

/// Asks for more and more until it is refused.
fn exhaust(it: &mut Program) {
    let stack = it.stack(&["serve.py:30 answer"]);
    let mut held = Vec::new();
    for _ in 0..MAX_ROUNDS {
        let bytes = match it.random.below(24) {
            0 => it.between(1000 * MIB, 2000 * MIB),
            1..=8 => it.between(MIB, 20 * MIB),
            _ => it.between(20 * MIB, 200 * MIB),
        };
        let block = it.malloc(bytes, stack);
        if it.one_in(6) {
            // The same once more, while another stream still reads the first.
            it.free_late(block);
            held.push(it.malloc(bytes, stack));
        } else {
            held.push(block);
        }
        if it.is_over() {
            return;
        }
        if it.one_in(3) {
            let place = usize::try_from(it.random.below(held.len() as u64)).unwrap();
            let block = held.swap_remove(place);
            if it.one_in(4) {
                it.free_late(block);
            } else {
                it.free(block);
            }
        }
    }
}
