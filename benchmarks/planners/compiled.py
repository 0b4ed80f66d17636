"""`torch.compile` with stock Inductor, alone and under its `activation_memory_budget`.

Responsible for compiling the whole loss, and for the reference that gradients are held against:
Inductor draws random numbers of its own, so where a model has dropout the reference is
`torch.compile` without a budget, from the same seed. That this is itself right is checked by points
whose compiled code draws what eager draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from benchmarks.planners.way import Loss, Way, ordinary_step

from memfit import Workload


def budgeted(workload: Workload, *, budget: float | None, reference: str) -> Way:
    """A compiled step.

    Args:
        workload: The workload.
        budget: The fraction of saved bytes that may stay; ``None`` for torch's default.
        reference: ``compiled`` to hold gradients against those of `torch.compile` alone; ``eager``
            to draw random numbers as eager does and hold them against eager's.

    Returns:
        The way.
    """
    draw_as(reference)
    if budget is not None:
        functorch.activation_memory_budget = budget
    step = ordinary_step(workload, _compiled(workload))
    return Way(step, reference=unbudgeted(workload) if reference == "compiled" else None)


def draw_as(reference: str) -> None:
    """Let compiled code draw random numbers of its own, or those that eager draws."""
    inductor.fallback_random = reference == "eager"


def unbudgeted(workload: Workload) -> Callable[[], Any]:
    """A step compiled without a budget; what it compiled is forgotten afterwards."""

    def step() -> Any:
        with functorch.patch(activation_memory_budget=1.0):
            result = ordinary_step(workload, _compiled(workload))()
        torch._dynamo.reset()
        return result

    return step


def _compiled(workload: Workload) -> Loss:
    """The loss under stock Inductor."""
    assert workload.loss is not None
    return torch.compile(workload.loss)
