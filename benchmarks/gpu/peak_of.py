"""Run a Python program and write down the peaks of torch's CUDA allocator.

    python3 -m benchmarks.gpu.peak_of RESULT.json SCRIPT.py [ARGUMENT...]
    python3 -m benchmarks.gpu.peak_of RESULT.json -m memfit run --budget 2GiB SCRIPT.py

Responsible for peaks that do not depend on what runs: memfit begins torch's peak statistics anew at
every step, so each value is kept before it goes. On a CPU there is nothing to write but the time.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
import time
from pathlib import Path

import torch

_seen = {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
_reset = torch.cuda.reset_peak_memory_stats


def keep() -> None:
    """Take in the peaks since they began anew last."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        _seen["peak_allocated_bytes"] = max(_seen["peak_allocated_bytes"], allocated)
        _seen["peak_reserved_bytes"] = max(_seen["peak_reserved_bytes"], reserved)


def keep_and_reset(*arguments: object) -> None:
    """What stands for torch's function."""
    keep()
    _reset(*arguments)  # type: ignore[arg-type]


def main(result: Path, program: list[str]) -> None:
    """Run the program as ``python`` would."""
    torch.cuda.reset_peak_memory_stats = keep_and_reset
    torch.cuda.memory.reset_peak_memory_stats = keep_and_reset
    began = time.perf_counter()

    def write() -> None:
        keep()
        result.write_text(json.dumps({**_seen, "seconds": time.perf_counter() - began}))

    atexit.register(write)
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
