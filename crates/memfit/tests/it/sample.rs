//! A small recorded step: two linear layers with six activations between them, and SGD.
//!
//! Written as JSON, the form in which a capture hands a trace over.

use memfit_engine::trace::Trace;
use serde_json::{Value, json};

const BATCH: u64 = 64;
const WIDTH: u64 = 32;
const HIDDEN: u64 = 512;
const STRINGS: [&str; 18] = [
    "",
    "float32",
    "aten.addmm.default",
    "aten.gelu.default",
    "aten.mse_loss.default",
    "aten.ones_like.default",
    "aten.mse_loss_backward.default",
    "aten.mm.default",
    "aten.gelu_backward.default",
    "aten.add_.Tensor",
    "layers.0.expand",
    "layers.0.gelu",
    "layers.0.contract",
    "/home/user/project/model.py:12",
    "/home/user/project/model.py:13",
    "layers.0.expand.weight",
    "layers.0.contract.weight",
    "x",
];

struct Table {
    allocations: Vec<Value>,
    values: Vec<Value>,
    ops: Vec<Value>,
}

impl Table {
    /// An allocation and its first value; both have the same index here.
    fn tensor(
        &mut self,
        category: &str,
        producer: Option<u32>,
        natural: (u32, u32),
        shape: [u64; 2],
        name: u32,
    ) -> usize {
        let bytes = 4 * shape[0] * shape[1];
        let allocation = self.allocations.len();
        self.allocations.push(json!({
            "bytes": bytes, "device": 0, "category": category, "producer": producer,
            "natural": [[natural.0, natural.1]], "name": name,
        }));
        self.values.push(json!({
            "allocation": allocation, "version": 0, "offset": 0, "shape": shape,
            "stride": [shape[1], 1], "dtype": 1,
        }));
        allocation
    }

    fn op(
        &mut self,
        phase: &str,
        name: u32,
        place: (u32, u32),
        reads: &[usize],
        outputs: &[usize],
    ) {
        let flops = if name == 2 || name == 7 {
            2 * BATCH * WIDTH * HIDDEN
        } else {
            0
        };
        self.ops.push(json!({
            "name": name, "phase": phase, "module": place.0, "source": place.1, "arguments": 0,
            "node": null, "reads": reads, "writes": [], "outputs": outputs, "flops": flops,
            "moved_bytes": 4 * BATCH * HIDDEN, "workspace_bytes": 0, "random": false, "view": false,
            "replayable": true,
        }));
    }
}

/// Activations between the two linear layers.
const DEPTH: u32 = 6;

/// The trace; captured at one batch size, so nothing is known about others.
pub(crate) fn trace() -> Trace {
    let mut table = Table {
        allocations: vec![],
        values: vec![],
        ops: vec![],
    };
    let end = 2 * DEPTH + 10;
    let (contracted, seeded) = (DEPTH + 1, DEPTH + 3);
    let expand = table.tensor("parameter", None, (0, end), [WIDTH, HIDDEN], 15);
    let contract = table.tensor("parameter", None, (0, end), [HIDDEN, WIDTH], 16);
    let x = table.tensor("input", None, (0, end), [BATCH, WIDTH], 17);
    let mut saved = Vec::new();

    let mut wide = table.tensor("activation", Some(0), (0, 2), [BATCH, HIDDEN], 0);
    table.op("forward", 2, (10, 13), &[x, expand], &[wide]);
    for layer in 1..=DEPTH {
        // The last layer's backward runs first.
        let unpack = seeded + 4 + DEPTH - layer;
        saved.push((wide, layer, unpack, unpack + 1));
        let natural = (layer, layer + 2);
        let next = table.tensor("activation", Some(layer), natural, [BATCH, HIDDEN], 0);
        table.op("forward", 3, (11, 14), &[wide], &[next]);
        wide = next;
    }
    saved.push((wide, contracted, seeded + 2, seeded + 3));
    let natural = (contracted, contracted + 2);
    let y = table.tensor("activation", Some(contracted), natural, [BATCH, WIDTH], 0);
    table.op("forward", 2, (12, 13), &[wide, contract], &[y]);
    saved.push((y, contracted + 1, seeded + 1, seeded + 2));
    let loss = table.tensor(
        "temporary",
        Some(contracted + 1),
        (contracted + 1, end),
        [1, 1],
        0,
    );
    table.op("forward", 4, (0, 0), &[y], &[loss]);

    let seed = table.tensor("temporary", Some(seeded), (seeded, seeded + 2), [1, 1], 0);
    table.op("backward", 5, (0, 0), &[loss], &[seed]);
    let at = seeded + 1;
    let dy = table.tensor("temporary", Some(at), (at, at + 3), [BATCH, WIDTH], 0);
    table.op("backward", 6, (0, 0), &[seed, y], &[dy]);
    let at = seeded + 2;
    let dcontract = table.tensor("gradient", Some(at), (at, end), [HIDDEN, WIDTH], 16);
    table.op("backward", 7, (12, 13), &[dy, wide], &[dcontract]);
    let at = seeded + 3;
    let mut gradient = table.tensor("temporary", Some(at), (at, at + 2), [BATCH, HIDDEN], 0);
    table.op("backward", 7, (12, 13), &[dy, contract], &[gradient]);
    for layer in (1..=DEPTH).rev() {
        let at = seeded + 4 + DEPTH - layer;
        let next = table.tensor("temporary", Some(at), (at, at + 2), [BATCH, HIDDEN], 0);
        let (input, ..) = saved[layer as usize - 1];
        table.op("backward", 8, (11, 14), &[gradient, input], &[next]);
        gradient = next;
    }
    let at = seeded + 4 + DEPTH;
    let dexpand = table.tensor("gradient", Some(at), (at, end), [WIDTH, HIDDEN], 15);
    table.op("backward", 7, (10, 13), &[gradient, x], &[dexpand]);
    table.op("optimizer", 9, (0, 0), &[dexpand], &[]);
    table.op("optimizer", 9, (0, 0), &[dcontract], &[]);

    let saved: Vec<Value> = saved
        .iter()
        .enumerate()
        .map(|(node, &(value, pack, unpack, release))| {
            json!({ "value": value, "node": node, "pack": pack, "unpack": unpack, "release": release })
        })
        .collect();
    let trace: Trace = serde_json::from_value(json!({
        "meta": {
            "target": "model.py:build", "torch_version": "2.15.0", "device_kind": "cpu",
            "optimizer": "SGD", "batch": BATCH, "training": true, "captured": "fake",
        },
        "devices": ["cpu"],
        "strings": STRINGS,
        "allocations": table.allocations,
        "values": table.values,
        "ops": table.ops,
        "saved": saved,
        "regions": [
            { "module": 10, "class": 0, "call": 0, "start": 0, "end": 1 },
            { "module": 11, "class": 0, "call": 0, "start": 1, "end": DEPTH + 1 },
            { "module": 12, "class": 0, "call": 0, "start": DEPTH + 1, "end": DEPTH + 2 },
        ],
        "updates": [],
    }))
    .unwrap();
    trace.check().unwrap();
    trace
}

/// What the Python side says about a script that trained two steps.
pub(crate) fn run(script: &str) -> Value {
    json!({
        "schema_version": 1, "script": script, "ended": "exited", "exit_code": 7,
        "elapsed_seconds": 2.5, "torch_imported": true,
        "devices": [{
            "device": "cpu", "peak_bytes": 4_194_304, "after_bytes": 1_048_576,
            "peak_by_category": { "parameter": 1_048_576, "other": 3_145_728 },
            "reserved_peak_bytes": null,
            "peak": { "seconds": 1.5, "phase": "backward", "steps_done": 1 },
        }],
        "steps": { "count": 2, "growing": 0, "growth_bytes_per_step": 0,
                   "growth_cause": null, "growth_advice": null },
        "oom": null, "snapshot": null, "notes": [],
    })
}

/// What the Python side says of a machine without a GPU where all else works.
pub(crate) fn examined() -> Value {
    let no_driver = "torch is built for CUDA 13.2, and there is no NVIDIA driver here";
    json!({
        "package_folder": "/home/user/venv/memfit",
        "python_version": "3.12.4", "python_path": "/home/user/venv/bin/python",
        "system": "Linux 6.8.0, x86_64", "glibc_version": "2.39", "processor": "a processor, 8 cores",
        "torch": {
            "version": "2.15.0+cu132", "folder": "/home/user/venv/torch", "cuda_version": "13.2",
            "rocm_version": null, "others": [], "has_onednn": true, "has_distributed": true,
        },
        "torch_refusal": null,
        "cuda": { "why_not": no_driver, "devices": [] },
        "tools": [
            { "name": "C++ compiler", "version": "g++ 13.2.0", "path": "/usr/bin/g++", "why_not": null },
            { "name": "Triton", "version": "3.9.0", "path": null, "why_not": null },
        ],
        "trials": {
            "run": null, "guard": null, "track": null, "offload_activations": null,
            "offload_optimizer": null, "offload_parameters": null, "park": null,
            "compile_cpu": null, "compile_cuda": no_driver,
        },
        "profiles": [
            { "device_kind": "cpu", "path": "/home/user/.cache/memfit/cpu.json",
              "calibrated": "2026-01-02", "age_days": 3, "is_used": true, "why_not": null },
            { "device_kind": "cuda", "path": "/home/user/.cache/memfit/cuda.json",
              "calibrated": null, "age_days": null, "is_used": false, "why_not": null },
        ],
        "folders": [
            { "purpose": "profiles that are kept", "path": "/home/user/.cache/memfit", "why_not": null },
            { "purpose": "offloaded tensors, by default", "path": "/tmp", "why_not": null },
        ],
        "offload": null, "missing_names": [], "remarks": [], "next_step": null,
    })
}
