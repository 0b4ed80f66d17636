"""What every benchmark shares: the machine it ran on, running memfit, and writing results.

Results are dated files that name date, torch version and machine; a number without them is none.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Machine:
    """Where numbers come from."""

    date: str
    torch: str
    processor: str
    cores: int
    memory_gib: int

    @classmethod
    def here(cls) -> Machine:
        """This machine, today."""
        processor = platform.machine()
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.exists():
            names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
            processor = names[0].partition(":")[2].strip() if names else processor
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
            torch=torch.__version__,
            processor=processor,
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(memory / 2**30),
        )

    def sentence(self) -> str:
        """One line below a table."""
        return (
            f"Measured {self.date}, torch {self.torch}, {self.cores} cores of {self.processor}, "
            f"{self.memory_gib} GiB."
        )


FLOOR = ("parameter", "optimizer_state", "input", "module_buffer")
"""Categories of bytes that no plan without offloading can touch."""


def memfit_json(command: str, *arguments: str) -> dict[str, Any]:
    """Run a memfit command with JSON output; "does not fit" is an answer, anything else raises."""
    program = [sys.executable, "-m", "memfit", command, *arguments, "--format", "json"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        message = f"{' '.join(program[1:])} ended with {done.returncode}:\n{done.stderr}"
        raise RuntimeError(message)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def verified_at_least(
    target: str,
    options: tuple[str, ...],
    floor: tuple[str, ...] = FLOOR,
    budget: str = "1%",
) -> dict[str, Any]:
    """One real run at the smallest peak that plans reach, and the bytes that none can touch.

    Args:
        target: What is verified.
        options: Which plans are allowed.
        floor: The categories of these bytes.
        budget: One that is taken instead where a plan keeps it.
    """
    plan = memfit_json("plan", target, "--budget", budget, *options)
    least = str(plan["minimum_peak_bytes"] + plan["margin_bytes"])
    taken = budget if plan["verdict"] == "fits" else least
    found = memfit_json("verify", target, "--budget", taken, *options)
    breakdown = memfit_json("predict", target)["breakdown"]["category"]
    stays = sum(part["bytes"] for part in breakdown if part["name"] in floor)
    return {**found, "floor_bytes": stays}


def write_results(name: str, machine: Machine, rows: Any, table: str) -> None:
    """Write DATE-NAME.json and .md."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = RESULTS / f"{machine.date}-{name}"
    document = {"machine": asdict(machine), "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"# {name}\n\n{table}\n\n{machine.sentence()}\n")


def replace_table(page: Path, marker: str, text: str) -> None:
    """Replace what stands between `<!-- marker -->` and `<!-- /marker -->`, if it is there."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    content = page.read_text() if page.exists() else ""
    if begin not in content or end not in content:
        return
    head, _, rest = content.partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def gib(count: int) -> str:
    """Bytes for a table cell."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
