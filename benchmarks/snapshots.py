"""Write the snapshots that the engine's tests read: what no public file shows.

Each scenario is a small program's requests, run by the driver program of the engine's oracle (the
real allocator on a stand-in CUDA runtime). The allocator's own snapshot becomes the pickle that
`torch.cuda.memory._dump_snapshot` writes (`torch/csrc/cuda/Module.cpp`); its own statistics become
`expected.json`. Stacks are made up, times count up by 10 us, so that the files are reproducible.

    cargo test -p memfit-engine --test oracle
    .venv/bin/python benchmarks/snapshots.py target/tmp/oracle/driver
"""

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "crates/memfit-engine/tests/data/snapshots"
MIB = 1 << 20
START_US = 1_790_000_000_000_000

# Innermost frame first, as PyTorch records them.
CPP = [
    ("??", 0, "c10::cuda::CUDACachingAllocator::Native::malloc"),
    ("??", 0, "at::detail::empty_cuda"),
]
TRAIN = [("train.py", 61, "step"), ("train.py", 88, "main"), ("train.py", 93, "<module>")]
STACKS: dict[str, list[tuple[str, int, str]]] = {
    "parameter": [
        *CPP,
        ("model.py", 14, "__init__"),
        ("train.py", 80, "main"),
        ("train.py", 93, "<module>"),
    ],
    "input": [*CPP, ("data.py", 22, "next_batch"), *TRAIN[1:]],
    "forward": [
        *CPP,
        ("torch/nn/modules/linear.py", 134, "forward"),
        ("torch/nn/modules/module.py", 1780, "_call_impl"),
        ("model.py", 31, "forward"),
        *TRAIN,
    ],
    "attention": [
        *CPP,
        ("torch/nn/functional.py", 6012, "scaled_dot_product_attention"),
        ("model.py", 27, "forward"),
        *TRAIN,
    ],
    "gradient": [
        *CPP,
        ("??", 0, "torch::autograd::AccumulateGrad::apply"),
        ("torch/autograd/graph.py", 865, "_engine_run_backward"),
        ("torch/_tensor.py", 630, "backward"),
        *TRAIN,
    ],
    "optimizer": [
        *CPP,
        ("torch/optim/adamw.py", 150, "_init_group"),
        ("torch/optim/optimizer.py", 516, "wrapper"),
        *TRAIN,
    ],
    "copy": [*CPP, ("prefetch.py", 18, "copy_to_device"), *TRAIN[1:]],
    "graph": [
        *CPP,
        ("torch/cuda/graphs.py", 187, "__enter__"),
        ("serve.py", 40, "capture"),
        ("serve.py", 55, "main"),
    ],
    "loss": [*CPP, ("train.py", 57, "step"), *TRAIN[1:]],
    "evaluate": [*CPP, ("evaluate.py", 12, "evaluate"), *TRAIN[1:]],
}


class Program:
    """Requests of a program, as a script for the driver."""

    def __init__(self) -> None:
        """Begin with no request."""
        self.lines: list[str] = []
        self.slots = itertools.count()

    def stack(self, name: str) -> None:
        """Requests from here on come from this stack."""
        self.lines.append(f"k {list(STACKS).index(name)}")

    def malloc(self, name: str, size: int, stream: int = 0) -> int:
        """Ask for bytes."""
        self.stack(name)
        slot = next(self.slots)
        self.lines.append(f"m {slot} {size} {stream:x}")
        return slot

    def free(self, *slots: int) -> None:
        """Let go."""
        self.lines.extend(f"f {slot}" for slot in slots)

    def line(self, line: str) -> None:
        """Do anything else the driver knows."""
        self.lines.append(line)


def train(program: Program, *, steps: int, layers: int, scale: Callable[[int], float]) -> None:
    """Steps of a network whose batch changes in size."""
    parameters = [program.malloc("parameter", 6 * MIB + 4096) for _ in range(layers)]
    states: list[int] = []
    for step in range(steps):
        size = scale(step)
        batch = program.malloc("input", int(3 * MIB * size))
        saved = []
        for _ in range(layers):
            scores = program.malloc("attention", int(9 * MIB * size))
            saved.append(program.malloc("forward", int(4 * MIB * size)))
            program.free(scores)
        loss = program.malloc("loss", 4)
        gradients = []
        for activation in reversed(saved):
            gradients.append(program.malloc("gradient", 6 * MIB + 4096))
            program.free(activation)
        if not states:
            states = [program.malloc("optimizer", 12 * MIB) for _ in parameters]
        program.free(*gradients, loss, batch)


def expandable(program: Program) -> None:
    """Expandable segments that grow with the batch and give pages back once."""
    train(program, steps=4, layers=4, scale=lambda step: 1 + step / 2)
    program.line("y 0")
    train(program, steps=1, layers=2, scale=lambda _: 3)


def streams(program: Program) -> None:
    """Copies on a stream of their own; the snapshot finds some frees still pending."""
    program.line("e 0")
    weights = [program.malloc("parameter", 8 * MIB) for _ in range(3)]
    for step in range(6):
        copies = [program.malloc("copy", 5 * MIB + 512 * part, 0x60) for part in range(3)]
        for copy in copies:
            program.line(f"r {copy} 0")
        results = [program.malloc("forward", 4 * MIB) for _ in copies]
        for result in results:
            program.line(f"r {result} c0")
        program.free(*copies, *results)
        if step < 4:
            program.line(f"c 0 {2 + step % 2}")
            program.line("c c0 3")
    program.free(weights[0])


def private_pools(program: Program, *, releases: bool = True) -> None:
    """Two CUDA graphs with a pool each, one released while its output lives on."""
    program.malloc("parameter", 40 * MIB)
    outputs = []
    for pool in (1, 2):
        program.line(f"b {pool} *")
        program.line("q 1")
        buffers = [program.malloc("graph", size * MIB) for size in (24, 3, 1)]
        outputs.append(program.malloc("graph", 700_000))
        program.free(*buffers)
        outputs.append(program.malloc("graph", 15 * MIB))
        program.line("q 0")
        program.line(f"n {pool}")
    program.free(outputs[0])
    if releases:
        program.line("l 1")
    program.line("y 0")
    program.malloc("forward", 30 * MIB)


def private_pools_kept(program: Program) -> None:
    """The same, none released: torch 2.15 deletes an expandable pool whose blocks live on."""
    private_pools(program, releases=False)


def oom_fragmentation(program: Program) -> None:
    """Enough is free, but in pieces that long-lived blocks pin."""
    program.malloc("parameter", 40 * MIB)
    rests = []
    for _ in range(7):
        program.free(program.malloc("forward", 60 * MIB))
        program.malloc("evaluate", 2 * MIB)
        # The rest of the segment stays in use until all segments are there.
        rests.append(program.malloc("forward", 58 * MIB))
    program.free(*rests)
    program.malloc("attention", 200 * MIB)
    program.malloc("forward", 10 * MIB)


def oom_live_set(program: Program) -> None:
    """More is alive than fits."""
    train(program, steps=2, layers=4, scale=lambda step: 1 + 7 * step)


def oom_cap(program: Program) -> None:
    """The device has room, the process may not take it."""
    program.malloc("parameter", 100 * MIB)
    program.line("g 0.4")
    program.malloc("forward", 90 * MIB)
    program.malloc("forward", 60 * MIB)


def oom_other(program: Program) -> None:
    """Another process holds the memory."""
    program.malloc("parameter", 100 * MIB)
    program.line(f"o {280 * MIB}")
    program.malloc("forward", 90 * MIB)
    program.malloc("forward", 60 * MIB)


def oom_pending(program: Program) -> None:
    """What is missing waits for another stream; asked once more, the request succeeds."""
    program.line("e 0")
    segment = program.malloc("copy", 200 * MIB, 0x60)
    program.free(segment)
    keep = program.malloc("copy", 20 * MIB, 0x60)
    copy = program.malloc("copy", 180 * MIB, 0x60)
    program.malloc("parameter", 100 * MIB)
    program.line(f"r {copy} 0")
    program.free(copy)
    program.malloc("forward", 4096)
    # Waiting for the other stream frees the copy, but its segment is not searched again.
    program.malloc("copy", 170 * MIB, 0x60)
    program.malloc("copy", 170 * MIB, 0x60)
    program.free(keep)


def growing_loss(program: Program) -> None:
    """`total_loss += loss` keeps every step's graph: a little more each step."""
    parameters = [program.malloc("parameter", 6 * MIB) for _ in range(3)]
    kept = []
    for _ in range(12):
        batch = program.malloc("input", 3 * MIB)
        saved = [program.malloc("forward", 2 * MIB + 1024) for _ in parameters]
        kept.append(program.malloc("loss", 512))
        gradients = [program.malloc("gradient", 6 * MIB) for _ in parameters]
        program.free(*gradients, *saved[:2], batch)


SCENARIOS: dict[str, tuple[Callable[[Program], None], str, int]] = {
    "expandable": (expandable, "expandable_segments:True", 2048),
    "streams": (streams, "", 1024),
    "private_pools": (private_pools, "", 1024),
    "private_pools_expandable": (private_pools_kept, "expandable_segments:True", 1024),
    "split_limit": (oom_live_set, "max_split_size_mb:32", 330),
    "oom_fragmentation": (oom_fragmentation, "", 512),
    "oom_live_set": (oom_live_set, "", 288),
    "oom_live_set_expandable": (oom_live_set, "expandable_segments:True", 288),
    "oom_cap": (oom_cap, "", 512),
    "oom_other_process": (oom_other, "", 512),
    "oom_pending": (oom_pending, "", 384),
    "growing_loss": (growing_loss, "", 2048),
}


def frames_of_stacks() -> list[list[dict[str, Any]]]:
    """One dict a frame, shared by all stacks, as PyTorch shares them."""
    known: dict[tuple[str, int, str], dict[str, Any]] = {}

    def frame(key: tuple[str, int, str]) -> dict[str, Any]:
        file, line, name = key
        return known.setdefault(key, {"name": name, "filename": file, "line": line})

    return [[frame(key) for key in stack] for stack in STACKS.values()]


def as_snapshot(dump: dict[str, Any], conf: str) -> dict[str, Any]:
    """The snapshot as `torch.cuda.memory._snapshot()` returns it."""
    stacks = frames_of_stacks()

    def frames(row: dict[str, Any]) -> list[dict[str, Any]]:
        return stacks[row["stack"]] if row["stack"] >= 0 else []

    def block(row: dict[str, Any], address: int) -> dict[str, Any]:
        return {
            "address": address,
            "size": row["size"],
            "requested_size": row["requested_size"],
            "state": row["state"],
            "frames": frames(row),
        }

    def segment(row: dict[str, Any]) -> dict[str, Any]:
        ends = itertools.accumulate(
            (part["size"] for part in row["blocks"]), initial=row["address"]
        )
        return {
            "device": row["device"],
            "address": row["address"],
            "total_size": row["total_size"],
            "allocated_size": row["allocated_size"],
            "active_size": row["active_size"],
            "requested_size": row["requested_size"],
            "stream": row["stream"],
            "segment_type": "large" if row["is_large"] else "small",
            "segment_pool_id": tuple(row["pool"]),
            "is_expandable": row["is_expandable"],
            "frames": frames(row),
            "blocks": [
                block(part, start) for part, start in zip(row["blocks"], ends, strict=False)
            ],
        }

    def event(row: dict[str, Any], number: int) -> dict[str, Any]:
        return {
            "action": row["action"],
            ("device_free" if row["action"] == "oom" else "addr"): row["addr"],
            "size": row["size"],
            "stream": row["stream"],
            "time_us": START_US + 10 * number,
            "compile_context": row["compile_context"],
            "user_metadata": row["user_metadata"],
            "pool_id": tuple(row["pool"]),
            "frames": frames(row),
        }

    settings = dump["settings"]
    return {
        "segments": [segment(row) for row in dump["segments"]],
        "device_traces": [[event(row, number) for number, row in enumerate(dump["trace"])]],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": conf,
            "max_split_size": settings["max_split_size"],
            "garbage_collection_threshold": float(settings["garbage_collection_threshold"]),
            "expandable_segments": settings["expandable_segments"],
            "pinned_num_register_threads": settings["pinned_num_register_threads"],
            "release_lock_on_cudamalloc": settings["release_lock_on_cudamalloc"],
            "pinned_use_cuda_host_register": settings["pinned_use_cuda_host_register"],
            "graph_capture_record_stream_reuse": settings["graph_capture_record_stream_reuse"],
            "roundup_power2_divisions": {
                str(1 << log): divisions for log, divisions in enumerate(settings["roundup"])
            },
            "max_round_threshold": settings["max_round_threshold"],
            "max_cached_size": settings["max_cached_size"],
        },
        "external_annotations": [],
        "host_segments": [],
        "host_traces": [],
    }


def expected(answer: str, total_mib: int, conf: str) -> dict[str, Any]:
    """What the allocator's own counters say."""
    statistics = next(line for line in answer.splitlines() if line.startswith("statistics"))

    def of(name: str, part: int) -> int:
        found = re.search(rf" {name} (\S+)", statistics)
        assert found is not None
        return int(found[1].split("/")[part]) if "/" in found[1] else int(found[1])

    return {
        "total_bytes": total_mib * MIB,
        "settings": conf,
        "peak": {
            name: of(name, 1) for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
        },
        "current": {
            name: of(name, 0) for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
        },
        "num_alloc_retries": of("retries", 0),
        "num_ooms": of("ooms", 0),
        "errors": [line for line in answer.splitlines() if line.startswith("CUDA out of memory")],
    }


def run(driver: Path, scenario: str, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The snapshot of a scenario, and what its counters say."""
    requests, conf, total_mib = SCENARIOS[scenario]
    program = Program()
    requests(program)
    script = "\n".join([*program.lines, f"J {path}", "s", ""])
    done = subprocess.run(
        [str(driver), str(total_mib * MIB), "descending"],
        input=script,
        capture_output=True,
        text=True,
        check=True,
        env={
            "LD_PRELOAD": str(driver.with_name("libcudart.so.13")),
            "PYTORCH_CUDA_ALLOC_CONF": conf,
            "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
        },
    )
    dump = json.loads(path.read_text())
    return as_snapshot(dump, conf), expected(done.stdout, total_mib, conf)


def main() -> None:
    """Write all files."""
    driver = Path(sys.argv[1]).resolve()
    truth = {}
    with tempfile.TemporaryDirectory() as folder:
        for scenario in SCENARIOS:
            snapshot, truth[scenario] = run(driver, scenario, Path(folder) / "dump.json")
            pickled = pickle.dumps(snapshot, protocol=4)
            (DATA / f"{scenario}.pickle").write_bytes(pickled)
            events = len(snapshot["device_traces"][0])
            sys.stdout.write(f"{scenario}: {events} events, {len(pickled)} bytes\n")
    (DATA / "expected.json").write_text(json.dumps(truth, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
