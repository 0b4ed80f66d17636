"""Functions that keep their own output on ``ctx``: named, and the batch is not cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import memfit


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = x * x
        return ctx.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.y.sqrt() * 2


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y.sqrt() * 2


class Squared(nn.Sequential):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__(nn.Linear(64, 512))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self[0](x).relu())


def workload(function: type[torch.autograd.Function]) -> memfit.Workload:
    torch.manual_seed(0)
    return memfit.Workload(
        model=Squared(function), batch=torch.randn(256, 64), loss=lambda m, x: m(x).mean()
    )


def notes_and_refusals(function: type[torch.autograd.Function]) -> tuple[str, dict[str, str]]:
    trace = memfit.trace(workload(function))
    notes = memfit.predict(trace).notes
    plan = memfit.plan(trace, budget="60%", allow="equivalent")
    return "; ".join(notes), {refusal.kind: refusal.reason for refusal in plan.refusals}


def test_an_output_kept_on_ctx_is_named_and_forbids_pieces():
    for _ in range(2):  # what an earlier recording has left counts once
        notes, refusals = notes_and_refusals(Kept)
        assert "512.0 KiB of a step stay until Python's cycle collector runs" in notes
        assert "`Kept` keeps its own output as `ctx.y`" in notes
        assert refusals["micro_batch"].startswith("`Kept` keeps its own output as `ctx.y`")


def test_one_that_is_saved_is_not():
    notes, refusals = notes_and_refusals(Saved)
    assert "cycle collector" not in notes
    assert "micro_batch" not in refusals
