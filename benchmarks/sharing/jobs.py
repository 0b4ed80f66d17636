"""Six training jobs and four inference pools in a third of the memory that they sum to.

Three ways: with memfit, all at once, within leases of a broker; one after another, each with all
cores and all memory; all at once without memfit. Every job has pauses in which it computes nothing.

    .venv/bin/python -m benchmarks.sharing.jobs --spill /scratch    # about four minutes

Memory is judged from outside, every few milliseconds: what all jobs have in memory, anonymous or
of files, above what each had before it began. Exits with 1 unless with memfit all jobs finish with
the same bits as without, never above the budget, 1.2 times faster than one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.record import ROOT, Machine, gib, write_results
from benchmarks.sharing.job import PAUSE_SECONDS, PHASES, plain_need, serve_need, train_need

JOBS = [("train", seed) for seed in range(6)] + [("serve", seed) for seed in range(6, 10)]
SUM_OVER_BUDGET = 3
BAR = 1.2
LOOK_SECONDS = 0.005


class Job:
    """A process that runs one job."""

    def __init__(self, kind: str, seed: int, threads: int, need: int = 0, spill: str = "") -> None:
        """Start it, up to where it waits for the word."""
        self.name = f"{kind} {seed}"
        job = [kind, str(seed), str(need), spill]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sharing.job", *job],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.base = (0, 0)
        self.said = ""
        self.is_over = False
        self.reader = threading.Thread(target=self._read, daemon=True)

    def wait_ready(self) -> None:
        """Wait until it waits; what it has in memory then does not count."""
        if cast("IO[str]", self.process.stdout).readline() != "ready\n":
            message = f"{self.name} did not begin"
            raise RuntimeError(message)
        self.base = resident(self.process.pid)

    def begin(self) -> None:
        """Give the word."""
        with contextlib.suppress(BrokenPipeError):
            stdin = cast("IO[str]", self.process.stdin)
            stdin.write("\n")
            stdin.flush()
        self.reader.start()

    def _read(self) -> None:
        self.said = cast("IO[str]", self.process.stdout).readline()
        self.is_over = True

    def result(self) -> dict[str, Any] | None:
        """Wait for its end; nothing if it did not finish."""
        self.reader.join()
        if self.process.wait() != 0 or not self.said:
            return None
        found: dict[str, Any] = json.loads(self.said)
        return found

    def held_bytes(self) -> int:
        """Bytes in memory above what it had before it began.

        Of files only until it has said its result: as it ends, Python reads through a hundred
        megabytes of torch's libraries, which are not its own.
        """
        anonymous, of_files = resident(self.process.pid)
        grown = anonymous - self.base[0]
        return max(grown if self.is_over else grown + of_files - self.base[1], 0)


def resident(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory, anonymous and of mapped files; none when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    words = dict(line.split(":", 1) for line in lines)
    anonymous, of_files = (words.get(name, "0").split()[0] for name in ("RssAnon", "RssFile"))
    return int(anonymous) << 10, int(of_files) << 10


class Judge(threading.Thread):
    """Sums up what jobs have in memory above their bases, again and again."""

    def __init__(self, jobs: list[Job]) -> None:
        """Create it."""
        super().__init__(daemon=True)
        self.jobs = jobs
        self.peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        """Look until told to stop."""
        while not self.done.wait(LOOK_SECONDS):
            self.peak = max(self.peak, sum(job.held_bytes() for job in self.jobs))


@contextlib.contextmanager
def broker(budget: int, folder: Path) -> Iterator[None]:
    """A broker for the jobs that are started meanwhile."""
    socket = folder / "broker.sock"
    program = [sys.executable, "-m", "memfit", "broker", "--memory", f"host={budget}"]
    with (folder / "broker.log").open("w") as log:
        process = subprocess.Popen([*program, "--socket", str(socket)], stderr=log)
    try:
        while not socket.exists():
            if process.poll() is not None:
                raise RuntimeError((folder / "broker.log").read_text())
            time.sleep(0.02)
        os.environ["MEMFIT_BROKER"] = str(socket)
        yield
    finally:
        os.environ.pop("MEMFIT_BROKER", None)
        process.terminate()
        process.wait()


def together(needs: dict[str, int] | None = None, spill: str = "") -> dict[str, Any]:
    """All jobs at once, one thread each; with memfit if it is said what they need."""
    start = time.monotonic()
    jobs = [Job(kind, seed, 1, needs[kind] if needs else 0, spill) for kind, seed in JOBS]
    for job in jobs:
        job.wait_ready()
    judge = Judge(jobs)
    judge.start()
    for job in jobs:
        job.begin()
    results = {job.name: job.result() for job in jobs}
    seconds = time.monotonic() - start
    judge.done.set()
    judge.join()
    return {"seconds": seconds, "peak_bytes": judge.peak, "results": results}


def in_turn() -> dict[str, Any]:
    """One job after another, with all cores."""
    start, peak, results = time.monotonic(), 0, {}
    for kind, seed in JOBS:
        job = Job(kind, seed, len(os.sched_getaffinity(0)))
        job.wait_ready()
        judge = Judge([job])
        judge.start()
        job.begin()
        results[job.name] = job.result()
        judge.done.set()
        judge.join()
        peak = max(peak, judge.peak)
    return {"seconds": time.monotonic() - start, "peak_bytes": peak, "results": results}


def measure(folder: Path, budget: int, needs: dict[str, int]) -> list[dict[str, Any]]:
    """All three ways."""
    with broker(budget, folder):
        leased = together(needs, str(folder))
    rows = [{"way": "memfit, all at once", **leased}]
    rows.append({"way": "one after another", **in_turn()})
    rows.append({"way": "all at once, without memfit", **together()})
    return rows


def table_of(rows: list[dict[str, Any]], budget: int) -> str:
    """The table and what it says."""
    leased, turns, plain = rows
    lines = [
        "| way | seconds | against one after another | finished | most memory | of the budget |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['seconds']:.1f} | {turns['seconds'] / row['seconds']:.2f} x "
        f"| {sum(one is not None for one in row['results'].values())} of {len(JOBS)} "
        f"| {gib(row['peak_bytes'])} | {100 * row['peak_bytes'] / budget:.0f} % |"
        for row in rows
    ]
    waited = [one["waited_seconds"] for one in leased["results"].values() if one] or [0.0]
    text = (
        f"The budget is {gib(budget)}; the jobs sum to {SUM_OVER_BUDGET} times as much. Each has "
        f"{PHASES} phases and {PHASES - 1} pauses of {PAUSE_SECONDS:g} s. With memfit a job waited "
        f"for leases {sum(waited) / len(waited):.1f} s on average, {max(waited):.1f} s at most; "
        f"{same(leased, plain)} of {len(JOBS)} ended with the same bits as without memfit."
    )
    return "\n".join([*lines, "", text])


def same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many jobs ended with the same bits in both ways."""
    pairs = [(one["results"][name], other["results"][name]) for name in one["results"]]
    return sum(a is not None and b is not None and a["digest"] == b["digest"] for a, b in pairs)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spill", type=Path, help="folder on a disk")
    arguments = parser.parse_args()
    needs = {"train": train_need(), "serve": serve_need()}
    plainly = {"train": needs["train"], "serve": plain_need()}
    budget = sum(plainly[kind] for kind, _ in JOBS) // SUM_OVER_BUDGET
    with tempfile.TemporaryDirectory(dir=arguments.spill) as folder:
        rows = measure(Path(folder), budget, needs)
    table = table_of(rows, budget)
    print(table)
    write_results("jobs", Machine.here(), {"budget_bytes": budget, "ways": rows}, table)
    leased, turns, plain = rows
    is_met = (
        same(leased, plain) == len(JOBS)
        and leased["peak_bytes"] <= budget
        and turns["seconds"] / leased["seconds"] >= BAR
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
