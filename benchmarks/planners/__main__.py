"""memfit beside every planner that can be run here: one command, one run, a table and a picture.

Every point is a process of its own: eager; activation checkpointing round every and every second
block; selective checkpointing that keeps what matrix products return; the SAC MILP of
`torch.distributed._tools`; `torch.compile` alone and under `activation_memory_budget`; memfit at
a ladder of budgets, and at the peak of every other planner's point that none of its kind undercuts
in both, step by step in turn with it. Measured are the peak by allocator events, CPU time by
interleaved pairs with eager, and gradients against eager. Predicted step times are judged at the
speed of the machine when it was profiled: eager's by steps right afterwards, a plan's by eager's
steps beside it.

    .venv/bin/pip install --requirement benchmarks/planners/requirements.txt
    .venv/bin/python -m benchmarks.planners            # all: hours; it says how many
    .venv/bin/python -m benchmarks.planners --quick    # small models
    .venv/bin/python -m benchmarks.planners --models vit --skip torch.compile "memfit compiled"

A run that was stopped goes on where it was; `--fresh` begins anew. `--peers-of RESULTS.json` takes
the other planners' points from an earlier run, as they change with torch alone, `--rows-of` all its
points but those of methods `--again`: so models can be run one by one, a large one's eager and
compiled methods too, and put together at last. A run of all methods writes
benchmarks/results/DATE-planners.json, .md and .png, of some of the models `DATE-planners-MODEL`, of
all eager or all compiled methods that with `-eager` or `-compiled`. Exits with 1 where a bar is
missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.planners import points
from benchmarks.planners.judgement import front, is_ours, judge
from benchmarks.planners.models import MODELS
from benchmarks.planners.report import document
from benchmarks.planners.runner import Runner
from benchmarks.record import RESULTS, ROOT, Machine, write_results

PROFILED = ("predicted_seconds", "profiled_step_seconds")
"""Of a model that was prepared: eager's step as its profile has it, and as measured after it."""
STEPS_BESIDE_PAIRS = 3
START_SECONDS = 15
COMPILE_SECONDS = 75


def main(arguments: list[str]) -> int:
    """Measure, judge, write."""
    chosen = _parse(arguments)
    folder = chosen.folder / ("quick" if chosen.quick else "full")
    if chosen.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    runner = Runner(folder, chosen.pairs, chosen.threads, chosen.jobs)
    for file in chosen.rows_of:
        runner.adopt(row for row in _rows_in(file) if row["method"] not in chosen.again)
    for file in chosen.peers_of:
        runner.adopt(row for row in _rows_in(file) if not is_ours(row))
    start = time.monotonic()
    eager = _start(runner, chosen)
    remaining = _points_of(chosen, eager)
    _print_estimate(runner, "other planners'", remaining, eager)
    rows = _with_rounding(runner, [*eager, *runner.rows(remaining)])
    ours: list[points.Point] = []
    for model in chosen.models:
        ours += points.ladder(model, quick=chosen.quick)
        ours += points.duels(front(row for row in rows if row["model"] == model))
    ours = [point for point in ours if _wanted(point, chosen)]
    _print_estimate(runner, "memfit's", ours, eager)
    for row in eager:
        if any(_needs_trace(runner, point) for point in ours if point["model"] == row["model"]):
            _prepared(runner, row)
    rows += _with_rounding(runner, runner.rows(ours))
    rows.sort(key=lambda row: (chosen.models.index(row["model"]), _position(row)))
    verdicts = judge(rows)
    page = document(rows, verdicts)
    spent = (
        f"The points ran for {runner.wall_seconds(rows) / 60:.0f} minutes, "
        f"this call for {(time.monotonic() - start) / 60:.0f}; {chosen.jobs} at a time, "
        f"{chosen.threads} threads each, "
        f"{chosen.pairs} pairs of steps a point; the C library kept what was freed."
    )
    page = f"{page}\n\n{spent}{_earlier(rows)}"
    print(page)
    _write(chosen, folder, rows, [verdict.as_dict() for verdict in verdicts], page)
    return 0 if all(verdict.met for verdict in verdicts) else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planners", description=(__doc__ or "").partition("\n")[0]
    )
    methods = points.METHODS[1:]
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--methods", nargs="+", choices=methods, default=list(methods), help="beside eager"
    )
    parser.add_argument("--skip", nargs="+", choices=methods, default=[], help="of the methods")
    parser.add_argument("--quick", action="store_true", help="small versions of the models")
    parser.add_argument("--pairs", type=int, default=3, help="timed pairs of steps a point")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every point")
    parser.add_argument("--jobs", type=int, default=1, help="points at a time")
    parser.add_argument("--fresh", action="store_true", help="forget the points of earlier runs")
    parser.add_argument(
        "--rows-of", nargs="+", type=Path, default=[], help="results to take all points from"
    )
    parser.add_argument(
        "--again", nargs="+", choices=points.METHODS, default=[], help="methods to run all the same"
    )
    parser.add_argument(
        "--peers-of", nargs="+", type=Path, default=[], help="results to take the peers from"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "target" / "planners", help="where points are kept"
    )
    return parser.parse_args(arguments)


def _rows_in(file: Path) -> list[points.Row]:
    """The points in a results file, those that ran or were refused."""
    results = json.loads(file.read_text())
    here, there = Machine.here().torch, results["machine"]["torch"]
    if here != there:
        sys.exit(f"{file}: measured with torch {there}, this is {here}")
    measured = {"measured": results["machine"]["date"]}
    rows: list[points.Row] = results["rows"]["points"]
    return [{**measured, **row} for row in rows if "peak_bytes" in row or "refused" in row]


def _earlier(rows: list[points.Row]) -> str:
    """How many of the points are of which earlier day."""
    days = Counter(row["measured"] for row in rows if "measured" in row)
    return "".join(f" {days[day]} of the points are of {day}." for day in sorted(days))


def _wanted(point: points.Point, chosen: argparse.Namespace) -> bool:
    return point["method"] in chosen.methods and point["method"] not in chosen.skip


def _start(runner: Runner, chosen: argparse.Namespace) -> list[points.Row]:
    """Capture and profile every model, unless results say what that gave, and measure eager."""
    rows = []
    for model in chosen.models:
        row = runner.row({"model": model, "quick": chosen.quick, "method": "eager"})
        if not all(key in row for key in PROFILED):
            prepared = _prepared(runner, row)
            row = {**row, **{key: prepared[key] for key in PROFILED if key in prepared}}
        rows.append(row)
    return rows


def _prepared(runner: Runner, row: points.Row) -> points.Row:
    """Trace and op times of a model, for all of memfit's points of it that are run."""
    prepared = runner.row({"model": row["model"], "quick": row["quick"], "method": "prepare"})
    if "failed" in prepared:
        sys.exit(f"{row['model']}: {prepared['failed']}")
    return prepared


def _with_rounding(runner: Runner, rows: list[points.Row]) -> list[points.Row]:
    """The rows, each with what rounding alone does to its model's gradients."""
    known = {row["model"]: row for row in rows if "rounding_error" in row}
    for row in rows:
        if row["model"] not in known:
            point = {"model": row["model"], "quick": row["quick"], "method": "rounding"}
            known[row["model"]] = runner.row(point)
    return [{**_rounding_of(known[row["model"]]), **row} for row in rows]


def _rounding_of(row: points.Row) -> points.Row:
    return {key: row[key] for key in ("rounding_error",) if key in row}


def _needs_trace(runner: Runner, point: points.Point) -> bool:
    return point["method"] == "memfit" and not runner.known(point)


def _points_of(chosen: argparse.Namespace, eager: list[points.Row]) -> list[points.Point]:
    return [
        point
        for row in eager
        for point in points.peers(row["model"], quick=chosen.quick)
        if _wanted(point, chosen)
    ]


def _print_estimate(
    runner: Runner, whose: str, asked: list[points.Point], eager: list[points.Row]
) -> None:
    """About how long points take that are not there yet, from eager's steps."""
    step_seconds = {row["model"]: row["eager_seconds"] for row in eager}
    seconds = 0.0
    for point in asked:
        if runner.known(point):
            continue
        ways = 3 if "beside" in point else 2
        steps = STEPS_BESIDE_PAIRS + ways * runner.pairs_of(point)
        seconds += START_SECONDS + 1.15 * steps * step_seconds[point["model"]] / runner.threads
        # memfit's graphs are often cut, and so compiled, a second time.
        seconds += COMPILE_SECONDS * {"torch.compile": 1, "memfit compiled": 2}.get(
            point["method"], 0
        )
    minutes = seconds / runner.jobs / 60
    print(f"{whose} points, estimated: {minutes:.0f} minutes", file=sys.stderr, flush=True)


def _position(row: points.Row) -> tuple[int, float]:
    """Methods in their order; within one, from the highest peak down."""
    return points.METHODS.index(row["method"]), -row.get("peak_bytes", 0)


def _write(
    chosen: argparse.Namespace,
    folder: Path,
    rows: list[points.Row],
    verdicts: list[dict[str, object]],
    page: str,
) -> None:
    """The results of full models by every method of a kind; the picture alone of any other run."""
    from benchmarks.planners.plot import draw  # needs matplotlib

    machine = Machine.here()
    kind = points.kind_of(set(chosen.methods) - set(chosen.skip))
    whole = kind is not None and not chosen.quick
    models = [] if set(chosen.models) == set(MODELS) else chosen.models
    name = "-".join(["planners", *models, *([kind] if kind else [])])
    picture = (RESULTS if whole else folder) / f"{machine.date}-{name}.png"
    draw(rows, picture, machine.sentence())
    print(picture, file=sys.stderr)
    if whole:
        page = f"![Step time against peak]({picture.name})\n\n{page}"
        document = {"points": rows, "verdicts": verdicts}
        write_results(name, machine, document, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
