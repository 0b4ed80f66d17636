"""What a piece is, and the one that is run: ``python -m benchmarks.gpu.piece NAME ...``.

Responsible for the order of the pieces, for what each is handed, and for running one in this
process. Not responsible for starting processes (:mod:`benchmarks.gpu.__main__`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Document, Results

PIECES = ("tests", "run", "peaks", "offload", "park", "guard", "allocator", "compiled", "costs")
"""In the order in which they run; each is a module of its name."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a piece is asked for.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        out: Where results go.
        scratch: A folder on a disk for what is spilt and cached; it is removed afterwards.
        is_small: Whether models are of rehearsal size.
        models: Names of the models to measure; all where there are none.
    """

    kind: str
    out: Path
    scratch: Path
    is_small: bool
    models: list[str] = field(default_factory=list)


def run_of(name: str) -> Callable[[Order, Results], None]:
    """How a piece is run."""
    run: Callable[[Order, Results], None] = import_module(f"benchmarks.gpu.{name}").run
    return run


def page_of(name: str) -> Callable[[Document], list[str]]:
    """How a piece is put on the page."""
    page: Callable[[Document], list[str]] = import_module(f"benchmarks.gpu.{name}").page
    return page


def collect(results: Results, name: str, figures: Iterable[dict[str, Any]]) -> bool:
    """Keep a measure's figures as they come; whether it came to its end.

    Args:
        results: Where to keep them.
        name: The row.
        figures: What the measure yields.
    """
    began = time.monotonic()
    ended = True
    for found in figures:
        if "out_of_time" in found:
            results.leave_out(name, found["out_of_time"])
            ended = False
            break
        results.put(name, found)
        ended = ended and "failed" not in found
    state = "" if ended else ", not to its end"
    print(f"  {name}: {time.monotonic() - began:.0f} s{state}", file=sys.stderr, flush=True)
    return ended


def main(arguments: list[str]) -> int:
    """Run one piece; 0 where it came to its end, whatever it found."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.piece")
    parser.add_argument("name", choices=PIECES)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--models", nargs="*", default=[])
    given = parser.parse_args(arguments)
    from benchmarks.gpu.device import Device, setting

    machine = setting(Device(given.device), small=given.small).as_dict()
    results = Results(given.name, given.out, machine, given.seconds)
    order = Order(given.device, given.out, given.scratch, given.small, given.models)
    run_of(given.name)(order, results)
    results.complete()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
