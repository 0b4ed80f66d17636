"""One way of running a workload's step: what every method hands to the measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from memfit import Workload

Loss = Callable[[Any, Any], Tensor]


@dataclass
class Way:
    """A step, ready to run, and what its method promises.

    Attributes:
        step: Runs one whole training step.
        reference: A step that draws the same random numbers, where eager's are others.
        settle: Runs steps until all later ones are alike, and completes what the method says of
            them; by default one step makes them so.
        predicted_peak_bytes: What the method says its peak is, if it says.
        predicted_seconds: What it says a step takes.
        notes: Further figures for the row.
    """

    step: Callable[[], Any]
    reference: Callable[[], Any] | None = None
    settle: Callable[[], Any] | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


class CannotRunError(Exception):
    """The method has no answer for this point; the message says why."""


def ordinary_step(workload: Workload, loss_of: Loss | None = None) -> Callable[[], Tensor]:
    """The step as one writes it: loss, backward, optimizer, gradients released.

    Args:
        workload: The workload; its optimizer exists already.
        loss_of: Computes the loss instead of the workload's own function.

    Returns:
        The step.
    """
    compute = loss_of or workload.loss
    optimizer = workload.optimizer
    assert compute is not None
    assert isinstance(optimizer, Optimizer)

    def step() -> Tensor:
        loss = compute(workload.model, workload.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
