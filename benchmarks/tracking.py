"""What counting allocations costs: CPU time of training steps with `memfit.track` over without.

    .venv/bin/python benchmarks/tracking.py

Counting cannot be undone in a process, so each measurement is a process of its own; they run in
pairs, and the median of the ratios counts. A track costs some 25 us and an allocation some 50 ns
more, so the bar of 2 % is for steps of tens of milliseconds; the small step shows what a track
round next to nothing costs. Exits with 1 where the bar is missed by more than half the spread of
the ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from record import ROOT, Machine, write_results

STEPS = """
import contextlib, json, sys, time
import torch, memfit
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
width, batch, steps = map(int, sys.argv[2:])
layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
data = torch.randn(batch, 64, width)
def step():
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
around = contextlib.nullcontext
if sys.argv[1] == "tracked":
    around = lambda: memfit.track("step", categories=False)
with around():
    step()
start = time.process_time()
for _ in range(steps):
    with around():
        step()
print(json.dumps(time.process_time() - start))
"""

CASES = {"small, 3 ms a step": (32, 2, 400), "larger, 60 ms a step": (256, 8, 24)}
PAIRS = 9
BAR = 0.02

HEADER = "| step | without, ms | tracked, ms | ratio | spread of ratios |\n|---|---|---|---|---|"


def main() -> int:
    """Measure, print, write."""
    rows = [measure(name, *sizes) for name, sizes in CASES.items()]
    table = "\n".join([HEADER, *map(table_row, rows)])
    print(table)
    write_results("tracking", Machine.here(), rows, table)
    large = rows[-1]
    return int(large["ratio"] - large["spread"] / 2 > 1 + BAR)


def measure(name: str, width: int, batch: int, steps: int) -> dict[str, Any]:
    """Paired CPU seconds of one size."""
    plain, tracked = [], []
    for _ in range(PAIRS):
        plain.append(seconds("plain", width, batch, steps) / steps)
        tracked.append(seconds("tracked", width, batch, steps) / steps)
    ratios = [b / a for a, b in zip(plain, tracked, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "step": name,
        "plain_seconds": statistics.median(plain),
        "tracked_seconds": statistics.median(tracked),
        "ratio": statistics.median(ratios),
        "spread": quarters[2] - quarters[0],
    }


def seconds(how: str, *sizes: int) -> float:
    """CPU seconds of all steps of one process."""
    command = [sys.executable, "-c", STEPS, how, *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout))


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"| {row['step']} | {row['plain_seconds'] * 1e3:.2f} | {row['tracked_seconds'] * 1e3:.2f} "
        f"| {row['ratio']:.3f} | {row['spread']:.3f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
