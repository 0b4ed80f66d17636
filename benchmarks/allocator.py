"""Compare the allocator's simulator with the real allocator: outcomes, recorded traces, speed.

The real one is `libc10_cuda.so` of the installed torch on a stand-in CUDA runtime; the engine's
tests drive it (`crates/memfit-engine/tests/oracle`). This runs them at length, in one run:

- random operations in every combination of settings, devices, streams and pools, outcomes compared;
- every snapshot of a folder of recorded ones, each address and segment predicted;
- two million allocations and frees for time, processor time of one core on both sides.

    .venv/bin/python benchmarks/allocator.py [FOLDER_OF_SNAPSHOTS]

Results go to benchmarks/results/DATE-allocator.json and .md. Exits with 1 on any difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import ROOT, Machine, write_results

OPERATIONS_A_CASE = 30_000
FIXTURES = ROOT / "crates/memfit-engine/tests/data/snapshots"


def main(folders: list[str]) -> int:
    """Run all three, print the tables, write the results."""
    cases = lines_of_test(
        "oracle", "random", environment={"MEMFIT_ORACLE_OPERATIONS": str(OPERATIONS_A_CASE)}
    )
    snapshots = []
    for folder in [str(FIXTURES), *folders]:
        path = str(Path(folder).resolve())
        environment = {"MEMFIT_SNAPSHOTS": path}
        snapshots += lines_of_test("it", "folder", "--ignored", environment=environment)
    speeds = lines_of_test("oracle", "speed", "--ignored", environment={})
    table = "\n\n".join([outcome_table(cases), replay_table(snapshots), speed_table(speeds)])
    print(table)
    rows = {"outcomes": cases, "replays": snapshots, "speeds": speeds}
    write_results("allocator", Machine.here(), rows, table)
    return 0


def lines_of_test(
    target: str, name: str, *arguments: str, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """The JSON lines a test prints; a test that fails ends the run."""
    command = ["cargo", "test", "--release", "--quiet", "--package", "memfit-engine"]
    command += ["--test", target, name, "--", "--nocapture", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MEMFIT_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or "skipped" in done.stderr:
        sys.exit(done.stdout + done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def outcome_table(cases: list[dict[str, Any]]) -> str:
    """Operations compared, by case."""
    lines = ["| case | settings | operations | differences |", "|---|---|---|---|"]
    lines += [
        f"| {row['case']} | `{row['settings'] or 'default'}` | {row['operations']:,} "
        f"| {row['mismatches']} |"
        for row in cases
    ]
    total = sum(row["operations"] for row in cases)
    lines.append(f"| all | | {total:,} | {sum(row['mismatches'] for row in cases)} |")
    return "\n".join(lines)


def replay_table(snapshots: list[dict[str, Any]]) -> str:
    """Predictions that came true, by snapshot."""
    lines = [
        "| recorded snapshot | allocations | new segments | released | final segments |",
        "|---|---|---|---|---|",
    ]
    kinds = ("allocations", "segments", "released", "final_segments")
    for row in snapshots:
        cells = [f"{row[kind][0]:,} of {row[kind][1]:,}" for kind in kinds]
        lines.append(f"| {row['snapshot']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_table(speeds: list[dict[str, Any]]) -> str:
    """Millions of operations a second, both sides."""
    lines = ["| case | real allocator, M op/s | simulator, M op/s |", "|---|---|---|"]
    for row in speeds:
        real, simulated = (
            row["operations"] / row[f"{side}_cpu_seconds"] / 1e6 for side in ("real", "simulator")
        )
        lines.append(f"| {row['case']} | {real:.1f} | {simulated:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
