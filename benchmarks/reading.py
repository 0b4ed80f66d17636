"""Reading and explaining a million events, beside Python's pickle and PyTorch's viewer.

    .venv/bin/python benchmarks/reading.py [--keep FOLDER]

The snapshots come from `tests/support/synthetic.py`: a training loop with 155 bytes an event.
Each row is a process of its own, and everything that it does counts, its imports included: the
program `memfit explain` beside the program `python -m torch.cuda._memory_viz trace_plot`. Bars: a
million events explained in 1.5 s and in the file's size plus 100 MB, ten times less CPU time than
`trace_plot`; five million in 8 s, with a page of at most 5 MB. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import ROOT, Machine, write_results

sys.path.insert(0, str(ROOT / "tests" / "support"))

READ = "import sys; from memfit._native import Snapshot; Snapshot.read(sys.argv[1])"
PICKLE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"

# Starts the process to be measured: the kernel counts the size of the one that starts it, too.
LAUNCH = """
import json, resource, subprocess, sys, time
start = time.monotonic()
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
wall = time.monotonic() - start
use = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, use.ru_utime + use.ru_stime, wall, use.ru_maxrss * 1024]))
"""

MILLION = 1_000_000
EXPLAIN_BAR, LARGE_BAR, FASTER_BAR = 1.5, 8.0, 10
PAGE_BAR_BYTES = 5_000_000
BEYOND_FILE_BYTES = 100_000_000

HEADER = """\
| what | events | file MB | CPU s | wall s | peak MB | page MB |
|---|---|---|---|---|---|---|"""


def main() -> int:
    """Make the files, run each reader on them, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="folder in which the snapshots stay")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        small, large = made(folder, MILLION), made(folder, 5 * MILLION)
        explain = ["-m", "memfit", "explain", "--format", "json"]
        page = Path(temporary) / "page.html"
        viewer = ["-m", "torch.cuda._memory_viz", "trace_plot", "-o", page]
        rows = [
            measure("memfit, read", ["-c", READ, small], small),
            measure("memfit explain", [*explain, small], small),
            measure("pickle.load", ["-c", PICKLE, small], small),
            measure("trace_plot", [*viewer, small], small),
            measure("memfit, read", ["-c", READ, large], large),
            measure("memfit explain", [*explain, large], large),
            measure("memfit explain --html", [*explain, large, "--html", page], large, page),
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


def measure(
    what: str, program: list[str | Path], path: Path, page: Path | None = None
) -> dict[str, Any]:
    """CPU and wall seconds and the largest resident size of one process; what it wrote."""
    # From the page cache, whichever row comes first.
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass
    command = [sys.executable, "-c", LAUNCH, sys.executable, *map(str, program)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    code, cpu_seconds, wall_seconds, peak_bytes = json.loads(done.stdout)
    if code != 0:
        message = f"{' '.join(command[3:])} ended with {code}"
        raise RuntimeError(message)
    row = {
        "what": what,
        "events": int(path.stem),
        "file_bytes": path.stat().st_size,
        "cpu_seconds": cpu_seconds,
        "wall_seconds": wall_seconds,
        "peak_resident_bytes": peak_bytes,
        "page_bytes": page.stat().st_size if page else None,
    }
    print(table_row(row), file=sys.stderr)
    return row


def missed(rows: list[dict[str, Any]]) -> bool:
    """Whether a bar is missed."""
    _, explain, _, plot, _, large, paged = rows
    return any(
        (
            explain["cpu_seconds"] > EXPLAIN_BAR,
            explain["peak_resident_bytes"] > explain["file_bytes"] + BEYOND_FILE_BYTES,
            plot["cpu_seconds"] < FASTER_BAR * explain["cpu_seconds"],
            large["cpu_seconds"] > LARGE_BAR,
            paged["cpu_seconds"] > LARGE_BAR,
            paged["page_bytes"] > PAGE_BAR_BYTES,
        )
    )


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    page = "" if row["page_bytes"] is None else f"{row['page_bytes'] / 1e6:.2f}"
    return (
        f"| {row['what']} | {row['events']:,} | {row['file_bytes'] / 1e6:.0f} "
        f"| {row['cpu_seconds']:.2f} | {row['wall_seconds']:.2f} "
        f"| {row['peak_resident_bytes'] / 1e6:.0f} | {page} |"
    )


if __name__ == "__main__":
    sys.exit(main())
