"""Updates with the optimizer's state in 8 bits: CPU time beside torch's own ways.

Ten layers of 1024 x 1024 with made-up gradients, on one thread: AdamW and SGD with momentum by
torch's loop, ``foreach`` and ``fused``, and by the kernel that reads and writes state in 8 bits.
Times are the least of some rounds, interleaved. A build with optimisations is needed.

    .venv/bin/python benchmarks/optimizer_bits.py      # some seconds

Exits with 1 if the kernel takes more than twice the time of torch's ``fused`` for AdamW, or half as
long again for SGD. For AdamW it is 1.4 to 1.8 times by what else the machine does: ``fused`` waits
for memory, the kernel for arithmetic, of which a neighbour on the same core takes a part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from memfit.apply.precision.optimizer_bits import UpdatesInEightBits
from memfit.measure.step_time import cpu_seconds
from record import Machine, write_results

ROUNDS = 40
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda parameters, **ways: AdamW(parameters, lr=1e-3, **ways),
    "SGD": lambda parameters, **ways: SGD(parameters, lr=1e-3, momentum=0.9, **ways),
}
MOST = {"AdamW": 2.0, "SGD": 1.5}
"""Times of torch's ``fused`` that the kernel may take."""

HEADER = "| optimizer | loop | foreach | fused | 8 bits |\n|---|---|---|---|---|"


def model() -> nn.Module:
    """Layers with gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10)))
    for parameter in layers.parameters():
        parameter.grad = torch.randn(parameter.shape) * 1e-3
    return layers


def updates(make: Callable[..., Optimizer]) -> dict[str, Callable[[], Any]]:
    """One step of an optimizer in each way, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for name, way in WAYS.items():
        found[name] = make(model().parameters(), **way).step
    layers = model()
    optimizer = make(layers.parameters())
    names = [name for name, p in layers.named_parameters() if p.numel() >= 4096]
    narrow = UpdatesInEightBits(optimizer, layers, {"names": names})
    narrow.place()
    found["8 bits"] = lambda: narrow.update_all().finish()
    return found


def main() -> int:
    """Compare, print, write."""
    torch.set_num_threads(1)
    rows = []
    for name, make in OPTIMIZERS.items():
        ways = updates(make)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS + 2):
            for way, step in ways.items():
                seconds = cpu_seconds(step)
                if number >= 2:
                    times[way].append(seconds)
        rows.append({"optimizer": name, **{way: min(all_) for way, all_ in times.items()}})
    lines = [
        f"| {row['optimizer']} | "
        + " | ".join(f"{1e3 * row[way]:.1f} ms" for way in (*WAYS, "8 bits"))
        + " |"
        for row in rows
    ]
    machine = Machine.here()
    table = "\n".join([HEADER, *lines])
    print(table, machine.sentence(), sep="\n\n")
    write_results("optimizer-bits", machine, rows, table)
    return int(any(row["8 bits"] > MOST[row["optimizer"]] * row["fused"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
