"""What backward needs the shape of alone is neither kept nor computed again."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from handmade import record
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.apply.remat.remat import Rematerialiser
from memfit.tensors.shape_saves import NODES

X1, X2, X3 = (torch.randn(2, 4, *sizes) for sizes in ((16,), (12, 12), (6, 6, 6)))
STATISTICS = (torch.randn(4), torch.rand(4) + 1, torch.rand(4) + 0.5)

CALLS: dict[str, tuple[Tensor, Any]] = {
    "_adaptive_avg_pool2d": (X2, lambda x: functional.adaptive_avg_pool2d(x, 3)),
    "_adaptive_avg_pool3d": (X3, lambda x: functional.adaptive_avg_pool3d(x, 3)),
    "adaptive_max_pool2d": (X2, lambda x: functional.adaptive_max_pool2d(x, 3)),
    "adaptive_max_pool3d": (X3, lambda x: functional.adaptive_max_pool3d(x, 3)),
    "avg_pool2d": (X2, lambda x: functional.avg_pool2d(x, 2)),
    "avg_pool3d": (X3, lambda x: functional.avg_pool3d(x, 2)),
    "convolution": (X2, lambda x: functional.conv2d(x, torch.ones(6, 4, 3, 3), padding=1)),
    "gather": (X2, lambda x: x.gather(1, torch.zeros(2, 4, 12, 12, dtype=torch.long))),
    "max_pool2d_with_indices": (X2, lambda x: functional.max_pool2d(x, 2)),
    "max_pool3d_with_indices": (X3, lambda x: functional.max_pool3d(x, 2)),
    "native_batch_norm": (X2, lambda x: functional.batch_norm(x, *STATISTICS)),
    "reflection_pad1d": (X1, lambda x: functional.pad(x, (1, 1), "reflect")),
    "reflection_pad2d": (X2, lambda x: functional.pad(x, (1,) * 4, "reflect")),
    "reflection_pad3d": (X3, lambda x: functional.pad(x, (1,) * 6, "reflect")),
    "replication_pad1d": (X1, lambda x: functional.pad(x, (1, 1), "replicate")),
    "replication_pad2d": (X2, lambda x: functional.pad(x, (1,) * 4, "replicate")),
    "replication_pad3d": (X3, lambda x: functional.pad(x, (1,) * 6, "replicate")),
}
"""A call of each op, of an input that asks for a gradient and weights that do not."""


class Between(nn.Module):
    """An op between two others whose outputs backward needs not."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return (self.op(x + self.scale) * 3.0).sum()


def gradient(model: nn.Module, x: Tensor, remat: Rematerialiser | None = None) -> Tensor:
    model.zero_grad()
    if remat is None:
        loss = model(x)
    else:
        with remat.forward():
            loss = model(x)
    loss.backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.clone()


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("name", NODES)
def test_what_only_its_shape_is_needed_of_is_not_computed_again(name, is_channels_last):
    x, op = CALLS[name]
    if is_channels_last and x.dim() > 3:
        x = x.contiguous(
            memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        )
    model = Between(op)
    expected = gradient(model, x)
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(lambda made: "add" in made.name))
    assert torch.equal(gradient(model, x, remat), expected)
    outcome = remat.outcome()
    assert outcome is not None
    assert (outcome.observations.dropped_saves, outcome.replayed_ops) == (1, 0)


@pytest.mark.parametrize("is_batch_norm", [False, True])
def test_weights_that_train_need_the_values(is_batch_norm):
    layer = nn.BatchNorm2d(4).eval() if is_batch_norm else nn.Conv2d(4, 4, 3)
    layer.bias.requires_grad_(requires_grad=False)

    def forward() -> Tensor:
        return layer(X2 + 1).sum()

    forward().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    remat = Rematerialiser(layer, record(layer, forward).remat(lambda made: "add" in made.name))
    with remat.forward():
        loss = forward()
    loss.backward()
    assert torch.equal(layer.weight.grad, expected)


def test_batch_normalisation_in_training_needs_the_values():
    model = Between(
        lambda x: functional.batch_norm(x, None, None, STATISTICS[2], training=True) ** 3
    )
    expected = gradient(model, X2)
    ops = record(model, lambda: model(X2))
    remat = Rematerialiser(model, ops.remat(lambda made: "add" in made.name))
    assert torch.equal(gradient(model, X2, remat), expected)
    assert remat.outcome().replayed_ops == 1


def test_whoever_else_asks_gets_the_values():
    model = Between(lambda x: functional.avg_pool2d(x, 2))
    kept = []

    def forward() -> Tensor:
        pooled = model.op(X2 + model.scale)
        kept.append(pooled.grad_fn)
        return pooled.sum()

    ops = record(model, forward)
    remat = Rematerialiser(model, ops.remat(lambda made: "add" in made.name))
    kept.clear()
    with remat.forward():
        loss = forward()
    assert torch.equal(kept[0]._saved_self, X2 + model.scale)
    loss.backward()


def test_a_backward_that_is_differentiated_again_gets_the_values():
    x, weight, model = X2.clone().requires_grad_(), torch.ones(4, 4, 3, 3), nn.Module()

    def forward() -> Tensor:
        return (functional.conv2d(x * x, weight) ** 2).sum()

    def second(remat: Rematerialiser | None) -> Tensor:
        with contextlib.nullcontext() if remat is None else remat.forward():
            loss = forward()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (result,) = torch.autograd.grad(first.pow(2).sum(), x)
        return result

    ops = record(model, forward)
    remat = Rematerialiser(model, ops.remat(lambda made: "mul" in made.name))
    assert torch.equal(second(remat), second(None))


WATCH_SECONDS = 7.0e-6
"""What an op takes longer that is watched: nothing else is added (``plan/executor.rs``)."""


class Frozen(nn.Module):
    """Frozen convolutions and evaluated normalisation behind a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        pairs = ((nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)) for _ in range(4))
        self.body = nn.Sequential(*(layer for pair in pairs for layer in pair)).eval()
        self.body.requires_grad_(requires_grad=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


@pytest.fixture
def frozen() -> memfit.Workload:
    torch.manual_seed(0)
    return memfit.Workload(
        model=Frozen(),
        batch=torch.randn(8, 3, 32, 32),
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(
            [parameter for parameter in parameters if parameter.requires_grad], lr=0.1
        ),
    )


def test_frozen_layers_keep_nothing_and_cost_nothing(frozen):
    proof = memfit.verify(frozen, "40%", forbid=("remat", "micro_batch"))
    assert "unneeded_saves" in {action.kind for action in proof.plan.actions}
    plan = memfit.plan(frozen, "40%", forbid=("remat", "micro_batch"))
    assert plan.promise == "exact"
    (saves,) = (action for action in plan.as_dict()["actions"] if "unneeded_saves" in action)
    watched = sum(it["end"] - it["start"] for it in saves["unneeded_saves"]["active"])
    more = plan.planned.predicted_step_seconds - plan.unplanned.predicted_step_seconds
    assert more <= watched * WATCH_SECONDS + 1e-12, "but for the order of a sum"
    assert proof.plan.lower_bound_ratio <= 1.0 + 1e-12
    assert proof.planned.measured_peak_bytes == proof.planned.predicted_peak_bytes
    assert proof.unplanned.measured_peak_bytes == proof.unplanned.predicted_peak_bytes


def test_a_prediction_names_what_is_saved_for_nothing(frozen):
    (saves,) = memfit.predict(frozen).unneeded_saves
    assert (saves.module, saves.count, saves.is_shape_needed) == ("body", 8, True)
    assert saves.bytes == 8 * 8 * 16 * 32 * 32 * 4
