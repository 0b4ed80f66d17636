"""Updates with the optimizer's state in 8 bits: CPU time beside torch's own ways.

Ten layers of 1024 x 1024 and 64 of 128 x 128 with made-up gradients, on one thread: AdamW and SGD
with momentum by torch's loop, ``foreach`` and ``fused``, and the latter with state in 8 bits. Times
are the least of some rounds, interleaved. A build with optimisations is needed.

    .venv/bin/python benchmarks/optimizer_bits.py      # some seconds

Exits with 1 if that takes more than one and a half times as long as ``fused`` alone, but for SGD
over small layers, which lie in a cache, and of which ``fused`` computes next to nothing. Of large
layers ``fused`` waits for memory, the kernel for arithmetic, of which a neighbour on the same core
takes a part; of small ones both wait for Python.
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
LAYERS = ((10, 1024), (64, 128))
"""How many, and how wide."""
MOST = {("AdamW", 1024): 1.5, ("AdamW", 128): 1.5, ("SGD", 1024): 1.5}
"""Times of torch's ``fused`` that the same may take with state in 8 bits, by width."""

HEADER = (
    "| optimizer | layers | loop | foreach | fused | 8 bits | of fused |\n"
    "|---|---|---|---|---|---|---|"
)


def model(count: int, width: int) -> nn.Module:
    """Layers with gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    for parameter in layers.parameters():
        parameter.grad = torch.randn(parameter.shape) * 1e-3
    return layers


def updates(make: Callable[..., Optimizer], count: int, width: int) -> dict[str, Callable[[], Any]]:
    """One step of an optimizer in each way, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for name, way in WAYS.items():
        found[name] = make(model(count, width).parameters(), **way).step
    layers = model(count, width)
    optimizer = make(layers.parameters(), **WAYS["fused"])
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
        for count, width in LAYERS:
            ways = updates(make, count, width)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(ROUNDS + 2):
                for way, step in ways.items():
                    seconds = cpu_seconds(step)
                    if number >= 2:
                        times[way].append(seconds)
            least = {way: min(all_) for way, all_ in times.items()}
            rows.append({"optimizer": name, "count": count, "width": width, **least})
    lines = [
        f"| {row['optimizer']} | {row['count']} x {row['width']} x {row['width']} | "
        + " | ".join(f"{1e3 * row[way]:.2f} ms" for way in (*WAYS, "8 bits"))
        + f" | {row['8 bits'] / row['fused']:.2f} |"
        for row in rows
    ]
    machine = Machine.here()
    table = "\n".join([HEADER, *lines])
    print(table, machine.sentence(), sep="\n\n")
    write_results("optimizer-bits", machine, rows, table)
    most = [MOST.get((row["optimizer"], row["width"]), float("inf")) for row in rows]
    return int(
        any(row["8 bits"] > most_ * row["fused"] for row, most_ in zip(rows, most, strict=True))
    )


if __name__ == "__main__":
    sys.exit(main())
