"""Runs points, each in a process of its own, and keeps their rows so that a run can go on.

Responsible for processes, the file of rows, and progress on stderr. A process that dies, hangs or
is killed leaves a row that says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from benchmarks.planners.points import FIELDS, LARGE, Point, Row, label, peer_of
from benchmarks.record import ROOT

TIME_LIMIT_SECONDS = 1800
PAIRS_LARGE = 2
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Has glibc (mallopt(3)) keep what is freed, as torch's allocator of CUDA does.

By default it gives memory back and forth, by what was freed last, and the kernel clears it anew:
of a step of GPT-2 that computes for 15.7 s of CPU time, between 0.0 and 3.2 s in one process.
"""
FAILED_LINES = 2
"""Last lines of a dead process that its row quotes."""


@dataclass
class Runner:
    """A run's folder and settings.

    Attributes:
        folder: Where rows, traces and compiled code are kept.
        pairs: Interleaved pairs of steps that are timed at each point; of large models, fewer.
        threads: Threads of every process.
        jobs: Processes at a time.
    """

    folder: Path
    pairs: int
    threads: int
    jobs: int
    _lock: Lock = field(default_factory=Lock)
    _rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the rows of an earlier run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                row = json.loads(line)
                self._rows[row["key"]] = row
        if self._rows:
            print(f"{len(self._rows)} points are there from before: {self._file}", file=sys.stderr)

    @property
    def _file(self) -> Path:
        return self.folder / "points.jsonl"

    def known(self, point: Point) -> bool:
        """Whether a point has been run."""
        return _key(point) in self._rows

    def row(self, point: Point) -> Row:
        """Run a point, or find its row.

        Args:
            point: The point.

        Returns:
            The point with its figures, or with ``refused`` or ``failed`` and the reason.
        """
        key = _key(point)
        if key not in self._rows:
            start = time.monotonic()
            row = {**point, **self._run(point), "key": key}
            row["wall_seconds"] = time.monotonic() - start
            print(f"{point['model']}, {label(point)}: {_summary(row)}", file=sys.stderr, flush=True)
            with self._lock, self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._rows[key] = row
        return self._rows[key]

    def rows(self, points: Iterable[Point]) -> list[Row]:
        """The rows of some points, several at a time if the run is set so."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(self.row, points))

    def pairs_of(self, point: Point) -> int:
        """Pairs of steps timed at a point: long steps scatter less."""
        large = point["model"] in LARGE and not point["quick"]
        return min(self.pairs, PAIRS_LARGE) if large else self.pairs

    def wall_seconds(self, rows: list[Row]) -> float:
        """How long the processes of some rows ran."""
        return float(sum(row["wall_seconds"] for row in rows))

    def adopt(self, rows: Iterable[Row]) -> None:
        """Take rows of an earlier run as they are, unless this run has them."""
        for row in rows:
            point = {key: row[key] for key in FIELDS if key in row}
            self._rows.setdefault(_key(point), {**row, "key": _key(point)})

    def _run(self, point: Point) -> Row:
        spec = {**point, "pairs": self.pairs_of(point), "folder": str(self.folder)}
        program = [sys.executable, "-m", "benchmarks.planners.point", json.dumps(spec)]
        environment = {
            **os.environ,
            **KEEPS_MEMORY,
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "passive",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }
        try:
            done = subprocess.run(
                program,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIME_LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"still running after {TIME_LIMIT_SECONDS} s"}
        if done.returncode == 0 and done.stdout:
            row: Row = json.loads(done.stdout.splitlines()[-1])
            return row
        said = [line for line in done.stderr.splitlines() if line.strip()][-FAILED_LINES:]
        return {"failed": f"ended with {done.returncode}: {' '.join(said)}"}


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _summary(row: Row) -> str:
    """One line of progress."""
    took = f" [{row['wall_seconds']:.0f} s]"
    for outcome in ("refused", "failed"):
        if outcome in row:
            return f"{outcome}: {row[outcome]}{took}"
    if "step_ratio" not in row:
        return f"done{took}"
    beside = ""
    if "beside" in row:
        beside = f"{row['beside_ratio']:.3f} x {label(peer_of(row))}, "
    return (
        f"{beside}{row['peak_bytes'] / 2**20:.1f} MiB, {row['step_ratio']:.3f} x, "
        f"gradient error {row['gradient_error']:.1e}{took}"
    )
