"""Training scripts that know nothing of memfit under `memfit run --budget`: kept, and the same?

The scripts are those of tests/run/script/scripts. Each runs plain first; its peak is counted where
torch asks the C library for memory, by a library of its own (benchmarks/tensor_count.c), in the
same way with memfit and without. Then it runs within 75 % and 55 % of that peak, given in bytes:
exact, exact with a folder to offload to, and with equivalent plans. What this memfit does not know
is left out and named. memfit is compiled to byte code first, as pip does for users. One thread;
CPU time is that of the whole process with its imports.

    .venv/bin/python benchmarks/scripts.py --part 1/4         # a quarter of the scripts
    .venv/bin/python benchmarks/scripts.py unet vae           # some
    .venv/bin/python benchmarks/scripts.py --ways exact --budgets 75
    .venv/bin/python benchmarks/scripts.py --list             # what there is

Results go to benchmarks/results/DATE-scripts.json and .md as they come; runs of one day add to one
file, a later one replaces what an earlier one said. The exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from compileall import compile_dir
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counted import Counter, Ended
from record import RESULTS, ROOT, Machine, write_results

SCRIPTS = ROOT / "tests" / "run" / "script" / "scripts"
BUDGETS = (75, 55)
LIMIT_SECONDS = 400
WAYS: dict[str, tuple[str, ...]] = {
    "exact": ("--no-offload",),
    "offload": ("--offload", "{folder}"),
    "equivalent": ("--allow", "equivalent"),
    "strict": ("--strict",),
}
DEFAULT_WAYS = ("exact", "offload", "equivalent")
OPTIONAL_FLAGS = ("--no-offload",)
"""What a way asks for where memfit knows it; without it the way runs all the same."""
STRICT_EXIT_CODE = 74
EQUIVALENT_WITHIN = 1e-4
EQUIVALENT_LINES = 10
KEPT_BARS = {("offload", 75): 0.85, ("offload", 55): 0.65}
KEPT_BARS |= {("equivalent", 75): 0.93, ("equivalent", 55): 0.80}
CPU_BAR = 1.15
UNPLANNED_BAR = 0.05
HEADER = "| script | way | budget | peak | kept | same | CPU | planned |\n" + 8 * "|---" + "|"
SMALLEST_BYTES = 8 << 20
"""Scripts below are tests: a budget for them is mostly rounding."""


@dataclass(frozen=True)
class Row:
    """One script under one budget, in one way."""

    script: str
    way: str
    percent: int
    plain_peak_bytes: int
    budget_bytes: int
    peak_bytes: int
    exit_code: int
    is_kept: bool
    is_same: bool
    is_said: bool
    is_planned: bool
    cpu_ratio: float
    planned: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What a later run replaces."""
        return self.script, self.way, self.percent


def main(words: list[str]) -> int:
    """Run the scripts asked for; write and print the tables."""
    arguments = parsed(words)
    names = arguments.names or [path.stem for path in sorted(SCRIPTS.glob("*.py"))]
    index, parts = map(int, arguments.part.split("/"))
    names = names[index - 1 :: parts]
    if arguments.list:
        print("\n".join(names))
        return 0
    ways = {way: flags for way in arguments.ways if (flags := known_flags(way)) is not None}
    machine = Machine.here()
    compile_dir(ROOT / "python" / "memfit", quiet=1)
    rows = {row.key: row for row in recorded(machine)}
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        counter = Counter(Path(folder))
        for name in names:
            for row in script_rows(name, counter, ways, arguments.budgets):
                print(line(row), flush=True)
                rows[row.key] = row
                write(machine, list(rows.values()))
    table, is_met = judgement(list(rows.values()))
    print(f"\n{table}")
    return 0 if is_met else 1


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Scripts under `memfit run --budget`.")
    parser.add_argument("names", nargs="*", help="scripts; all without any")
    parser.add_argument("--part", default="1/1", help="a share of them, as 2/4")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(DEFAULT_WAYS))
    parser.add_argument("--budgets", type=numbers, default=list(BUDGETS), help="in %% of the peak")
    parser.add_argument("--list", action="store_true", help="say which scripts and end")
    return parser.parse_args(words)


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(one) for one in text.split(",")]


def known_flags(way: str) -> tuple[str, ...] | None:
    """The flags of a way; nothing, and a word, where this memfit does not know them."""
    asked = [sys.executable, "-m", "memfit", "run", "--help"]
    known = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    flags = WAYS[way]
    missing = [flag for flag in flags if flag.startswith("--") and flag not in known]
    if set(missing) <= set(OPTIONAL_FLAGS):
        return tuple(flag for flag in flags if flag not in missing)
    print(f"`{way}` is left out: this memfit has no {' '.join(missing)}", file=sys.stderr)
    return None


def recorded(machine: Machine) -> list[Row]:
    """What earlier runs of today found."""
    path = RESULTS / f"{machine.date}-scripts.json"
    if not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def script_rows(
    name: str, counter: Counter, ways: dict[str, tuple[str, ...]], budgets: list[int]
) -> Iterator[Row]:
    """One script, plain and under each budget in each way; the rows as they come."""
    script = str(SCRIPTS / f"{name}.py")
    plain = counter.run([script], LIMIT_SECONDS)
    if plain.exit_code:
        print(f"| {name} | plain | | | | | | {plain.errors.strip().splitlines()[-1:]} |")
        return
    if plain.peak_bytes < SMALLEST_BYTES:
        print(f"`{name}` is left out: it takes {mib(plain.peak_bytes)}", file=sys.stderr)
        return
    for percent in budgets:
        budget_bytes = plain.peak_bytes * percent // 100
        for way, flags in ways.items():
            words = ["-m", "memfit", "run", "--budget", str(budget_bytes), "--report", "run.json"]
            ended = counter.run([*words, *flags, script], LIMIT_SECONDS)
            yield judged(name, way, percent, plain, ended, budget_bytes)


def judged(name: str, way: str, percent: int, plain: Ended, ended: Ended, budget_bytes: int) -> Row:
    """What a run was worth."""
    report = json.loads(ended.report) if ended.report else {}
    loops = (report.get("fitting") or {}).get("loops", [])
    stopped = way == "strict" and ended.exit_code == STRICT_EXIT_CODE
    same_end = ended.exit_code == plain.exit_code
    if way == "equivalent":
        is_same = same_end and close(timeless(plain.output), timeless(ended.output))
    else:
        is_same = stopped or (same_end and timeless(plain.output) == timeless(ended.output))
    return Row(
        script=name,
        way=way,
        percent=percent,
        plain_peak_bytes=plain.peak_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=ended.peak_bytes,
        exit_code=ended.exit_code,
        is_kept=0 < ended.peak_bytes <= budget_bytes and not stopped,
        is_same=is_same,
        is_said=stopped if way == "strict" else "over budget" in ended.errors.lower(),
        is_planned=any(loop["planned"]["steps"] for loop in loops),
        cpu_ratio=round(ended.cpu_seconds / plain.cpu_seconds, 3),
        planned=planned(report, loops, ended),
    )


def planned(report: dict[str, Any], loops: list[dict[str, Any]], ended: Ended) -> str:
    """Which steps ran by a plan, and why others did not."""
    if not report:
        return f"exit code {ended.exit_code}: {(ended.errors.strip().splitlines() or [''])[-1]}"
    reasons = [(report["fitting"] or {}).get("refusal"), *report["notes"]]
    steps = dict.fromkeys(("observed", "planned", "unplanned"), 0)
    for loop in loops:
        for kind in steps:
            steps[kind] += loop[kind]["steps"]
        plan = loop["plan"]
        if plan is not None and not plan["fits"]:
            reasons.append("no plan fits" + ("" if plan["actions"] else " or saves anything"))
        reasons += [loop["refusal"], loop["divergence"], *loop["notes"]]
        if plan is not None and not loop["refusal"]:
            kinds = sorted({action["kind"] for action in plan["actions"]})
            reasons.append(f"({', '.join(kinds) or 'as it is'})")
    said = dict.fromkeys(filter(None, reasons))
    total = sum(steps.values())
    return "; ".join([f"{steps['planned']} of {total} steps", *said]).replace("|", "/")


def timeless(text: str) -> str:
    """What a script printed, without what the clock says."""
    return re.sub(r"'(?:train|eval)_(runtime|\w+_per_second)': '?[\d.]+'?", "", text)


def close(expected: str, found: str) -> bool:
    """Whether the first lines say the same but for rounding."""
    number = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|nan|inf")
    pairs = list(zip(expected.splitlines(), found.splitlines(), strict=False))[:EQUIVALENT_LINES]
    for one, other in pairs:
        if number.sub("", one) != number.sub("", other) and not re.search("[0-9a-f]{64}", one):
            return False
        for a, b in zip(number.findall(one), number.findall(other), strict=False):
            if abs(float(a) - float(b)) > EQUIVALENT_WITHIN * max(abs(float(a)), 1e-3):
                return False
    return len(expected.splitlines()) == len(found.splitlines())


def line(row: Row) -> str:
    """One row of the long table."""
    over = row.peak_bytes / row.budget_bytes
    kept = "yes" if row.is_kept else f"{over:.2f} x" + (" (said)" if row.is_said else "")
    cells = [row.script, row.way, f"{row.percent} %: {mib(row.budget_bytes)}", mib(row.peak_bytes)]
    cells += [kept, "yes" if row.is_same else "**no**", f"{row.cpu_ratio:.2f} x", row.planned]
    return f"| {' | '.join(cells)} |"


def mib(count: int) -> str:
    """Bytes for a cell."""
    return f"{count / 2**20:.1f} MiB"


def judgement(rows: list[Row]) -> tuple[str, bool]:
    """The short table, and whether every bar is met."""
    lines = ["| | found | bar |", "|---|---|---|"]
    verdicts = []

    def judge(what: str, found: str, bar: str, *, is_met: bool) -> None:
        verdicts.append(is_met)
        lines.append(f"| {what} | {found} | {bar} |{'' if is_met else ' missed'}")

    same = sum(row.is_same for row in rows)
    judge("results as without memfit", f"{same} of {len(rows)}", "all", is_met=same == len(rows))
    for way in WAYS:
        for percent in sorted({row.percent for row in rows}, reverse=True):
            of = [row for row in rows if (row.way, row.percent) == (way, percent)]
            bar = KEPT_BARS.get((way, percent))
            if of and way != "strict":
                share = sum(row.is_kept for row in of) / len(of)
                found = f"{sum(row.is_kept for row in of)} of {len(of)} ({share:.0%})"
                wanted = "" if bar is None else f">= {bar:.0%}"
                met = bar is None or share >= bar
                judge(f"kept, {way}, {percent} %", found, wanted, is_met=met)
    silent = [row for row in rows if not row.is_kept and not row.is_said]
    judge("over budget without saying so", str(len(silent)), "0", is_met=not silent)
    times = [row.cpu_ratio for row in rows if row.percent == BUDGETS[0]]
    if times:
        median = statistics.median(times)
        is_met = median <= CPU_BAR
        judge("CPU time, median, 75 %", f"{median:.2f} x", f"<= {CPU_BAR} x", is_met=is_met)
    names = {row.script for row in rows}
    without = sorted(names - {row.script for row in rows if row.is_planned})
    share = len(without) / max(len(names), 1)
    found = f"{len(without)} of {len(names)}: {', '.join(without)}"
    judge("scripts without a planned step", found, "<= 5 %", is_met=share <= UNPLANNED_BAR)
    return "\n".join(lines), all(verdicts)


def write(machine: Machine, rows: list[Row]) -> None:
    """Keep what is known so far."""
    rows = sorted(rows, key=lambda row: (row.script, -row.percent, row.way))
    table = "\n".join([judgement(rows)[0], "", HEADER, *map(line, rows)])
    write_results("scripts", machine, [asdict(row) for row in rows], table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
