"""Reading and explaining a million events, beside Python's pickle and PyTorch's viewer.

    .venv/bin/python benchmarks/reading.py [--keep FOLDER]

The snapshots come from `tests/snapshot/synthetic.py`: a training loop with 155 bytes an event.
Each row is a process of its own. For memfit, everything the process does counts, its start
included; for the others only loading and their own work, not the import of torch. Bars: a million
events explained in 1.5 s and in the file's size plus 100 MB, ten times less CPU time than
`trace_plot`; five million in 8 s. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import ROOT, Machine, write_results

sys.path.insert(0, str(ROOT / "tests" / "snapshot"))

READ = "import sys; from memfit._native import Snapshot; Snapshot.read(sys.argv[1])"
EXPLAIN = ["-m", "memfit", "explain"]
PICKLE = """
import pickle, sys, time
start = time.process_time()
with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
print(time.process_time() - start)
"""
TRACE_PLOT = """
import pickle, sys, time
from torch.cuda._memory_viz import trace_plot
start = time.process_time()
with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
trace_plot(snapshot)
print(time.process_time() - start)
"""

MILLION = 1_000_000
EXPLAIN_BAR, LARGE_BAR, FASTER_BAR = 1.5, 8.0, 10
BEYOND_FILE_BYTES = 100_000_000

HEADER = "| what | events | file MB | CPU s | wall s | peak MB |\n|---|---|---|---|---|---|"


def main() -> int:
    """Make the files, run each reader on them, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="folder in which the snapshots stay")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        small, large = made(folder, MILLION), made(folder, 5 * MILLION)
        rows = [
            measure("memfit, read", ["-c", READ], small, MILLION),
            measure("memfit, explain", EXPLAIN, small, MILLION),
            measure("pickle.load", ["-c", PICKLE], small, MILLION),
            measure("trace_plot", ["-c", TRACE_PLOT], small, MILLION),
            measure("memfit, read", ["-c", READ], large, 5 * MILLION),
            measure("memfit, explain", EXPLAIN, large, 5 * MILLION),
        ]
    table = "\n".join([HEADER, *map(table_row, rows)])
    print(table)
    write_results("reading", Machine.here(), rows, table)
    return int(missed(rows))


def made(folder: Path, events: int) -> Path:
    """The snapshot of so many events; one that is there already is taken."""
    from synthetic import Shape, write

    path = folder / f"{events}.pickle"
    if not path.exists():
        print(f"writing {events} events", file=sys.stderr)
        write(Shape(events=events), path)
    return path


def measure(what: str, program: list[str], path: Path, events: int) -> dict[str, Any]:
    """CPU and wall seconds and the largest resident size of one process."""
    command = [sys.executable, *program, str(path)]
    if program is EXPLAIN:
        command += ["--format", "json"]
    # From the page cache, whichever row comes first.
    path.read_bytes()
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_seconds = time.monotonic() - start
    if process.returncode != 0:
        message = f"{' '.join(command)} ended with {process.returncode}"
        raise RuntimeError(message)
    own_seconds = None if what.startswith("memfit") else float(json.loads(output))
    row = {
        "what": what,
        "events": events,
        "file_bytes": path.stat().st_size,
        "cpu_seconds": own_seconds or usage.ru_utime + usage.ru_stime,
        "wall_seconds": wall_seconds,
        "peak_resident_bytes": usage.ru_maxrss * 1024,
    }
    print(table_row(row), file=sys.stderr)
    return row


def missed(rows: list[dict[str, Any]]) -> bool:
    """Whether a bar is missed."""
    _, explain, _, plot, _, large = rows
    return any(
        (
            explain["cpu_seconds"] > EXPLAIN_BAR,
            explain["peak_resident_bytes"] > explain["file_bytes"] + BEYOND_FILE_BYTES,
            plot["cpu_seconds"] < FASTER_BAR * explain["cpu_seconds"],
            large["cpu_seconds"] > LARGE_BAR,
        )
    )


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"| {row['what']} | {row['events']:,} | {row['file_bytes'] / 1e6:.0f} "
        f"| {row['cpu_seconds']:.2f} | {row['wall_seconds']:.2f} "
        f"| {row['peak_resident_bytes'] / 1e6:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
