"""What a guard costs: CPU time of training steps under `memfit.guard` over those without.

    .venv/bin/python benchmarks/guard.py

A guard leaves traces in the C library's settings, so each measurement is a process of its own; they
run in pairs, in turns, and the median of the ratios counts. The budget is far above what the steps
take: nothing is refused. Beside it stands how much resident private memory the steps made the
process grow by, at the end, and the bytes of their tensors at the peak. Exits with 1 where a step
costs more than 4 % by more than half the spread of the ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from record import ROOT, Machine, gib, write_results

STEPS = """
import contextlib, json, sys, time
import torch, memfit
from torch import nn
from memfit.track import cpu
torch.manual_seed(0)
torch.set_num_threads(1)
how, model_name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Pointwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        x = self.linear(x)
        for _ in range(6):
            x = torch.tanh(x) * 1.1 + x.sigmoid()
        return x

if model_name == "transformer":
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model, data = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (8, 128, 256)
elif model_name == "convolutions":
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16 * 16, 10))
    data = (32, 3, 32, 32)
elif model_name == "pointwise":
    model, data = Pointwise(), (8192, 64)
else:
    model, data = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), (64, 32)
data = torch.randn(data)
optimizer = torch.optim.AdamW(model.parameters())

def step():
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

warm = nn.Linear(64, 64)
warm(torch.randn(2, 64)).sum().backward()
before = resident()
with memfit.guard("8GiB") if how == "guarded" else contextlib.nullcontext():
    for _ in range(3):
        step()
    start = time.process_time()
    for _ in range(steps):
        step()
    seconds = (time.process_time() - start) / steps
    grown = resident() - before
cpu.start()
window = cpu.Window()
step()
peak = window.close().peak_bytes
print(json.dumps([seconds, grown, peak]))
"""

CASES = {"transformer": 12, "convolutions": 24, "pointwise": 60, "small layers": 400}
PAIRS = 9
BAR = 0.04

HEADER = (
    "| step | without, ms | guarded, ms | ratio | spread of ratios | tensors at the peak "
    "| growth without | growth guarded |\n|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Measure, print, write."""
    rows = [measure(name, steps) for name, steps in CASES.items()]
    table = "\n".join([HEADER, *map(table_row, rows)])
    print(table)
    write_results("guard", Machine.here(), rows, table)
    return int(any(row["ratio"] - row["spread"] / 2 > 1 + BAR for row in rows))


def measure(name: str, steps: int) -> dict[str, Any]:
    """Paired measurements of one model."""
    plain, guarded = [], []
    for pair in range(PAIRS):
        for how in ("plain", "guarded") if pair % 2 else ("guarded", "plain"):
            (plain if how == "plain" else guarded).append(one(how, name, steps))
    ratios = [after[0] / before[0] for before, after in zip(plain, guarded, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "step": name,
        "plain_seconds": statistics.median(row[0] for row in plain),
        "guarded_seconds": statistics.median(row[0] for row in guarded),
        "ratio": statistics.median(ratios),
        "spread": quarters[2] - quarters[0],
        "peak_bytes": guarded[0][2],
        "plain_growth_bytes": statistics.median(row[1] for row in plain),
        "guarded_growth_bytes": statistics.median(row[1] for row in guarded),
    }


def one(how: str, name: str, steps: int) -> list[float]:
    """CPU seconds a step, bytes grown by, and tensor bytes at the peak, of one process."""
    command = [sys.executable, "-c", STEPS, how, name, str(steps)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    figures: list[float] = json.loads(done.stdout)
    return figures


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"| {row['step']} | {row['plain_seconds'] * 1e3:.2f} | {row['guarded_seconds'] * 1e3:.2f} "
        f"| {row['ratio']:.3f} | {row['spread']:.3f} | {gib(row['peak_bytes'])} "
        f"| {gib(int(row['plain_growth_bytes']))} | {gib(int(row['guarded_growth_bytes']))} |"
    )


if __name__ == "__main__":
    sys.exit(main())
