"""Gradients of one tensor that meet: what a recorded step takes is what a real one takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peaks import measured_peak, predicted_peak
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture import record
from memfit.workload import Workload


def rows() -> Tensor:
    return torch.arange(64) * 3


def kept(hidden: Tensor) -> Tensor:
    """What a hook keeps of each gradient is the hook's, too."""
    found: list[Tensor] = []
    parts = [hidden.tanh(), hidden.exp(), hidden.sigmoid()]
    for part in parts:
        part.register_hook(found.append)
    return parts[0] + parts[1] * parts[2]


class Gradient(torch.autograd.Function):
    """A function of the user's that adds in its own backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient.sin() + gradient


def scan(hidden: Tensor) -> Tensor:
    state, states = torch.zeros(64), []
    for row in range(24):
        state = 0.9 * state + hidden[row]
        states.append(state)
    return torch.stack(states)


MEETINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "scan": scan,
    "slices": lambda hidden: hidden[:150].sin() + hidden[50:] * hidden[25:175],
    "split": lambda hidden: hidden.split(100)[0] + hidden.chunk(4)[1].repeat(2, 1),
    "unbind": lambda hidden: sum(hidden.unbind()) + hidden,
    "cat": lambda hidden: torch.cat([hidden.sin(), hidden.cos()]) @ hidden.t(),
    "rows": lambda hidden: hidden[rows()].sum() + hidden.index_select(0, rows()) * hidden[:64],
    "gather": lambda hidden: hidden.gather(0, rows().unsqueeze(1).expand(64, 64)) + hidden[:64],
    "same": lambda hidden: (hidden + hidden) * hidden.sigmoid(),
    "kept": kept,
    "function": lambda hidden: Gradient.apply(hidden) * Gradient.apply(hidden.exp()) + hidden,
    "expanded": lambda hidden: hidden.sum(0).expand(200, 64) * hidden + hidden.mean(),
    "transposed": lambda hidden: hidden.t().exp().t() * hidden + hidden.t().contiguous().t().sin(),
    "residual": lambda hidden: functional.gelu(functional.layer_norm(hidden, (64,))) + hidden,
    "attention": lambda hidden: functional.scaled_dot_product_attention(
        hidden.view(1, 4, 50, 64), hidden.view(1, 4, 50, 64), hidden.view(1, 4, 50, 64)
    ),
    "where": lambda hidden: torch.where(hidden > 0, hidden.exp(), hidden) + hidden.cumsum(0),
    "images": lambda hidden: (
        functional.interpolate(
            functional.avg_pool2d(hidden.view(1, 8, 40, 40), 2), scale_factor=2.0
        )
        + functional.max_pool2d(hidden.view(1, 8, 40, 40), 3, 1, 1)
    ),
}


class Meets(nn.Module):
    """Uses one large result in several ways."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 64))
        self.compute = compute

    def forward(self, batch: Tensor) -> Tensor:
        return self.compute((self.weight * batch).sin())


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    return Workload(
        Meets(MEETINGS[name]),
        torch.randn(200, 64),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.parametrize("name", MEETINGS)
def test_gradients_that_meet_take_what_they_take_without_a_mode(name: str):
    assert predicted_peak(record(workload(name))) == measured_peak(workload(name))


@pytest.mark.parametrize("name", ["scan", "slices", "cat", "residual", "transposed"])
def test_tied_to_a_parameter_as_well(name: str):
    def work() -> Workload:
        made = workload(name)
        return Workload(
            made.model,
            made.batch,
            lambda model, batch: model(batch).square().mean() + model.weight.exp().mean(),
            made.optimizer,
        )

    assert predicted_peak(record(work())) == measured_peak(work())
