"""Static placement beside google/minimalloc: CPU seconds, and how low.

    .venv/bin/python benchmarks/placement.py FOLDER [--minimalloc PROGRAM] [--seconds 10]

FOLDER holds MiniMalloc's ``benchmarks/challenging`` (``A.1048576.csv`` to ``K.1048576.csv``; the
capacity stands in the name) and traced steps (``training_*.csv``). PROGRAM, or ``MINIMALLOC`` in
the environment, is a release build of google/minimalloc. Large problems are made here.

CPU seconds count all threads; reading the file is part of them. Every placement is checked by a
sweep that shares nothing with memfit. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memfit
from record import Machine, write_results

SUM_BAR, MINIMALLOC_RATIO_BAR, TRAINING_BAR, LARGE_BAR = 3.0, 5.0, 0.005, 10.0
LOWEST_BARS = {"D": 1_040_384, "J": 1_040_384}

Ranges = dict[str, tuple[int, int, int]]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minimalloc", type=Path, default=os.environ.get("MINIMALLOC"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--note", default="", help="what to say about PROGRAM below the tables")
    arguments = parser.parse_args()
    hard = [
        measure_hard(path, arguments.minimalloc, arguments.seconds)
        for path in sorted(arguments.folder.glob("?.*.csv"))
    ]
    training = [measure_training(path) for path in sorted(arguments.folder.glob("training_*.csv"))]
    large = [measure_large(name, problem) for name, problem in large_problems()]
    parts = [hard_table(hard), training_table(training), large_table(large), arguments.note]
    table = "\n\n".join(filter(None, parts))
    print(table)
    rows = {"hard": hard, "training": training, "large": large}
    write_results("placement", Machine.here(), rows, table)
    return int(is_missed(hard, training, large))


def is_missed(hard: list[Any], training: list[Any], large: list[Any]) -> bool:
    """Whether a bar is missed."""
    ours = sum(row["cpu_seconds"] for row in hard)
    missed = any(row["height"] > row["capacity"] for row in hard) or ours > SUM_BAR
    if all(row["minimalloc_cpu_seconds"] is not None for row in hard):
        theirs = sum(row["minimalloc_cpu_seconds"] for row in hard)
        missed |= theirs < MINIMALLOC_RATIO_BAR * ours
    missed |= any(row["lowest"] > LOWEST_BARS.get(row["name"], sys.maxsize) for row in hard)
    missed |= any(row["status"] != "optimal" for row in training)
    missed |= any(row["cpu_seconds"] > TRAINING_BAR for row in training)
    return missed or any(row["seconds"] > LARGE_BAR * 1.1 for row in large)


def measure_hard(path: Path, minimalloc: Path | None, seconds: float) -> dict[str, Any]:
    """One instance of MiniMalloc's."""
    capacity = int(path.name.split(".")[1])
    allocations = read(path)
    one_pass, _ = timed(path, time_limit=0.0)
    placed, cpu = timed(path, capacity=capacity, threads=1)
    check(allocations, placed.offsets, placed.height)
    threaded, all_cpu = timed(path, capacity=capacity)
    assert threaded == placed, "another number of threads, another answer"
    lowest, _ = timed(path, time_limit=seconds)
    check(allocations, lowest.offsets, lowest.height)
    return {
        "name": path.name.split(".")[0],
        "allocations": len(allocations),
        "capacity": capacity,
        "lower_bound": placed.lower_bound,
        "one_pass_height": one_pass.height,
        "height": placed.height,
        "cpu_seconds": cpu,
        "all_threads_cpu_seconds": all_cpu,
        "lowest": lowest.height,
        "lowest_status": lowest.status,
        "minimalloc_cpu_seconds": minimalloc and run_minimalloc(minimalloc, path, capacity),
    }


def measure_training(path: Path) -> dict[str, Any]:
    """One traced step; the median of five, as it takes milliseconds."""
    allocations = read(path)
    runs = [timed(path, threads=1) for _ in range(5)]
    placed, cpu = sorted(runs, key=lambda run: run[1])[2]
    check(allocations, placed.offsets, placed.height)
    return {
        "name": path.stem.removeprefix("training_"),
        "allocations": len(allocations),
        "lower_bound": placed.lower_bound,
        "height": placed.height,
        "status": placed.status,
        "cpu_seconds": cpu,
    }


def measure_large(name: str, allocations: Ranges) -> dict[str, Any]:
    """One problem beyond exact search."""
    one_pass, _ = timed(allocations, time_limit=0.0)
    start = time.perf_counter()
    placed, cpu = timed(allocations, time_limit=LARGE_BAR)
    seconds = time.perf_counter() - start
    check(allocations, placed.offsets, placed.height)
    return {
        "name": name,
        "allocations": len(allocations),
        "lower_bound": placed.lower_bound,
        "one_pass_height": one_pass.height,
        "height": placed.height,
        "status": placed.status,
        "cpu_seconds": cpu,
        "seconds": seconds,
    }


def large_problems() -> Iterator[tuple[str, Ranges]]:
    """Problems like long training steps, and cut from a rectangle (the optimum is known)."""
    yield "step, 18,000", step_like(18_000)
    yield "step, 60,000", step_like(60_000)
    yield "cut, 20,000", cut_rectangle(20_000)


def step_like(count: int) -> Ranges:
    """Saved activations nest as forward and backward do; three of four live for a few ops."""
    chance = random.Random(count)  # noqa: S311 - a fixed sequence, nothing secret
    sizes = [512 * chance.randrange(1, 1 << chance.randrange(1, 15)) for _ in range(24)]
    ranges: Ranges = {}
    for index in range(count):
        size = chance.choice(sizes)
        if chance.random() < 0.25:
            birth = chance.randrange(count)
            death = 2 * count - birth + chance.randrange(8)
        else:
            birth = chance.randrange(2 * count)
            death = birth + 1 + chance.randrange(6)
        ranges[str(index)] = (birth, max(death, birth + 1), size)
    return ranges


def cut_rectangle(count: int) -> Ranges:
    """A rectangle of time and bytes, cut at random until there are enough pieces."""
    chance = random.Random(count)  # noqa: S311 - a fixed sequence, nothing secret
    pieces = [(0, 1 << 20, 0, 1 << 30)]
    while len(pieces) < count:
        at = chance.randrange(len(pieces))
        left, right, low, high = pieces[at]
        if chance.random() < 0.5 and right - left > 1:
            cut = chance.randrange(left + 1, right)
            pieces[at] = (left, cut, low, high)
            pieces.append((cut, right, low, high))
        elif high - low > 1:
            cut = chance.randrange(low + 1, high)
            pieces[at] = (left, right, low, cut)
            pieces.append((left, right, cut, high))
    return {str(i): (left, right, high - low) for i, (left, right, low, high) in enumerate(pieces)}


def timed(subject: Path | Ranges, **options: Any) -> tuple[memfit.Placement, float]:
    """A placement and the CPU seconds of all threads it took."""
    start = time.process_time()
    placed = memfit.place(subject, **options)
    return placed, time.process_time() - start


def run_minimalloc(program: Path, path: Path, capacity: int) -> float | None:
    """CPU seconds of google/minimalloc with its own defaults; ``None`` when it gives up."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "placed.csv"
        flags = [f"--capacity={capacity}", f"--input={path}", f"--output={output}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([program, *flags, "--timeout=120s"], check=False, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not output.exists():
            return None
        with output.open() as file:
            offsets = {row["id"]: int(row["offset"]) for row in csv.DictReader(file)}
    allocations = read(path)
    height = max(offsets[name] + size for name, (_, _, size) in allocations.items())
    assert height <= capacity
    check(allocations, offsets, height)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read(path: Path) -> Ranges:
    """The allocations of a file."""
    with path.open() as file:
        rows = csv.DictReader(file)
        return {row["id"]: (int(row["lower"]), int(row["upper"]), int(row["size"])) for row in rows}


def check(allocations: Ranges, offsets: dict[str, int], height: int) -> None:
    """Sweep over time: what is alive, sorted by offset, must not overlap."""
    events = []
    for name, (lower, upper, size) in allocations.items():
        assert 0 <= offsets[name] <= height - size
        events += [(upper, 0, name), (lower, 1, name)]
    alive: list[tuple[int, int]] = []
    for _, is_birth, name in sorted(events):
        piece = (offsets[name], offsets[name] + allocations[name][2])
        at = bisect.bisect_left(alive, piece)
        if not is_birth:
            assert alive.pop(at) == piece
            continue
        assert at == 0 or alive[at - 1][1] <= piece[0], name
        assert at == len(alive) or piece[1] <= alive[at][0], name
        alive.insert(at, piece)


def seconds(value: float | None) -> str:
    """CPU seconds for a table cell."""
    return "-" if value is None else f"{value:.3f}"


def hard_table(rows: list[dict[str, Any]]) -> str:
    """MiniMalloc's instances."""
    lines = [
        "CPU seconds to a placement within the file's capacity, and the lowest in the time given",
        "",
        (
            "| instance | n | lower bound | first order | memfit s | all threads s | "
            "minimalloc s | lowest | of lower bound |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bound = row["lower_bound"]
        lines.append(
            f"| {row['name']} | {row['allocations']} | {bound} | "
            f"{row['one_pass_height'] / bound:.3f} | {seconds(row['cpu_seconds'])} | "
            f"{seconds(row['all_threads_cpu_seconds'])} | "
            f"{seconds(row['minimalloc_cpu_seconds'])} | {row['lowest']} | "
            f"{row['lowest'] / bound:.4f} |"
        )
    sums = [
        sum(row[key] for row in rows) if all(row[key] is not None for row in rows) else None
        for key in ("cpu_seconds", "all_threads_cpu_seconds", "minimalloc_cpu_seconds")
    ]
    lines.append("| sum | | | | " + " | ".join(map(seconds, sums)) + " | | |")
    return "\n".join(lines)


def training_table(rows: list[dict[str, Any]]) -> str:
    """Traced steps."""
    lines = ["| step | n | height | status | CPU ms |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['allocations']} | {row['height']} | {row['status']} | "
        f"{row['cpu_seconds'] * 1e3:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def large_table(rows: list[dict[str, Any]]) -> str:
    """Problems beyond exact search."""
    lines = [
        "| problem | n | first order / lower bound | memfit / lower bound | status | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['allocations']} | "
        f"{row['one_pass_height'] / row['lower_bound']:.4f} | "
        f"{row['height'] / row['lower_bound']:.4f} | {row['status']} | {row['cpu_seconds']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
