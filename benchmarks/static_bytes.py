"""Bytes a parameter: weights, gradients and optimizer state, beside other libraries' ways.

Eight layers of 1024 x 1024 on one row, so that activations are nearly nothing. `kept` is what lives
between steps, weights and state; `peak` is the most that lives at once in a step, with gradients
and the update's temporaries. A library that is not installed is left out, with a word about it.

    .venv/bin/python benchmarks/static_bytes.py      # some seconds

Results go to benchmarks/results/DATE-static-bytes.json and .md. Exits with 1 where parameters in
bfloat16 with state in 8 bits take more than 6.1 bytes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import memfit
from memfit.measure import measure_peak, static_tensors
from record import Machine, write_results

Make = Callable[[Any], Optimizer]
MOST = 6.1
OTHERS = ("remat", "unneeded_saves", "one_by_one", "micro_batch", "chunk", "shrink")
HEADER = "| weights and optimizer | kept | peak of a step |\n|---|---|---|"


def workload(make: Make, dtype: torch.dtype = torch.float32) -> memfit.Workload:
    """The layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(dtype)
    return memfit.Workload(model, torch.randn(1, 1024, dtype=dtype), loss, make)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Any loss."""
    return F.mse_loss(model(batch), batch)


def adamw(parameters: Any) -> Optimizer:
    """Torch's."""
    return AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Steps:
    """A way to take steps."""

    load: memfit.Workload
    optimizer: Optimizer
    step: Callable[[], Any]


@contextlib.contextmanager
def by_hand(make: Make, dtype: torch.dtype = torch.float32) -> Iterator[Steps]:
    """The step as one writes it."""
    load = workload(make, dtype)
    optimizer = make(load.model.parameters())

    def step() -> None:
        loss(load.model, load.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    yield Steps(load, optimizer, step)


@contextlib.contextmanager
def fitted(allow: str, forbid: tuple[str, ...]) -> Iterator[Steps]:
    """The step by the plan of least peak that memfit has with leave for one kind of action."""
    load = workload(adamw)
    options: dict[str, Any] = {"forbid": (*OTHERS, *forbid), "allow": allow}
    least = memfit.plan(load, "1%", **options).minimum_budget_bytes
    with contextlib.closing(memfit.fit(load, least, **options)) as fit:
        assert allow in {action.kind for action in fit.plan.actions}, "the plan does not use it"
        assert fit.optimizer is not None
        yield Steps(load, fit.optimizer, lambda: fit.step(load.batch))


def bitsandbytes(parameters: Any) -> Optimizer:
    """Its AdamW with state in 8 bits."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3)


def flash(parameters: Any) -> Optimizer:
    """FlashOptim's AdamW, as far as it goes without a GPU: neither 8 bits nor error correction."""
    from flashoptim import FlashAdamW

    return FlashAdamW(parameters, lr=1e-3, quantize=False, master_weight_bits=None, fused=False)


HALF = "memfit, bfloat16 weights, state in 8 bits"
FUSED = ("fuse_optimizer",)
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[Steps]]] = {
    "torch AdamW, fused": lambda: by_hand(lambda ps: AdamW(ps, lr=1e-3, fused=True)),
    "torch AdamW, foreach": lambda: by_hand(lambda ps: AdamW(ps, lr=1e-3, foreach=True)),
    "bitsandbytes AdamW8bit": lambda: by_hand(bitsandbytes),
    "bitsandbytes AdamW8bit, bfloat16 weights": lambda: by_hand(bitsandbytes, torch.bfloat16),
    "FlashOptim AdamW, bfloat16 weights, on a CPU": lambda: by_hand(flash, torch.bfloat16),
    "memfit, state in 8 bits": lambda: fitted("optimizer_bits", FUSED),
    HALF: lambda: fitted("half_parameters", FUSED),
    f"{HALF}, updates in backward": lambda: fitted("half_parameters", ()),
}


def main() -> int:
    """Measure, print, write."""
    rows = []
    for name, way in WAYS.items():
        try:
            row = measured(name, way)
        except ImportError as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        rows.append(row)
    lines = [f"| {row['way']} | {row['kept']:.2f} | {row['peak']:.2f} |" for row in rows]
    machine = Machine.here()
    table = "\n".join([HEADER, *lines])
    print(table, machine.sentence(), sep="\n\n")
    write_results("static-bytes", machine, rows, table)
    (half,) = (row["peak"] for row in rows if row["way"] == HALF)
    return int(half > MOST)


def measured(
    name: str, way: Callable[[], contextlib.AbstractContextManager[Steps]]
) -> dict[str, Any]:
    """What one way takes, in bytes a parameter."""
    with way() as steps:
        steps.step()
        steps.step()
        load = steps.load
        found = measure_peak(steps.step, static_tensors(load, steps.optimizer))
        numbers = sum(parameter.numel() for parameter in load.model.parameters())
    outside = load.batch.nbytes
    kept, peak = found.static_bytes - outside, found.peak_bytes - outside
    return {"way": name, "kept": kept / numbers, "peak": peak / numbers}


if __name__ == "__main__":
    sys.exit(main())
