"""How far gradients are off is measured, and judged beside the noise of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from workloads import tanh_layers

import memfit
from memfit.errors import UsageError
from memfit.verify.approximation import (
    approximation,
    batch_noise,
    idle_parameters,
    update_error,
)

SHRINK = {
    "allow": "shrink",
    "forbid": ("remat", "fuse_optimizer", "one_by_one", "chunk", "micro_batch"),
}


def gradients():
    return {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]]), "small": torch.zeros(2)}


def test_lengths_angle_and_the_worst_are_those_of_a_hand():
    got = gradients()
    got["a"] = torch.tensor([3.0, 0.5])
    found = approximation(gradients(), got, 0.5)
    assert found["gradient_error"] == pytest.approx(0.1)
    assert found["cosine"] == pytest.approx(25 / (5 * math.sqrt(25.25)))
    assert (found["worst_parameter"], found["worst_error"]) == ("a", pytest.approx(1 / 6))
    assert (found["batch_noise"], found["not_finite"]) == (0.5, 0)


@pytest.mark.parametrize(("planted", "count"), [(float("nan"), 1), (float("inf"), 1)])
def test_what_is_not_finite_is_counted_and_no_error_is_made_of_it(planted, count):
    got = gradients()
    got["b"] = torch.tensor([[planted]])
    found = approximation(gradients(), got, 0.5)
    assert found["not_finite"] == count
    assert found["gradient_error"] is None


def test_gradients_that_are_nothing_and_stay_so_are_not_off():
    nothing = {name: torch.zeros_like(gradient) for name, gradient in gradients().items()}
    assert approximation(nothing, nothing, None)["gradient_error"] == 0
    assert approximation(nothing, gradients(), None)["gradient_error"] is None


def test_a_gradient_that_is_missing_is_off_by_all_of_it():
    got = gradients()
    del got["b"]
    found = approximation(gradients(), got, None)
    assert found["gradient_error"] == pytest.approx(0.8)


def test_the_noise_is_that_of_many_batches():
    load = tanh_layers()
    found = batch_noise(load)
    drawn = []
    for seed in range(24):
        load.model.zero_grad()
        batch = torch.randn(512, 128, generator=torch.Generator().manual_seed(seed))
        load.loss(load.model, batch).backward()
        drawn.append(torch.cat([p.grad.flatten() for p in load.model.parameters()]))
    mean = torch.stack(drawn).mean(0)
    spread = torch.stack([(g - mean).norm() for g in drawn]).square().mean().sqrt() / mean.norm()
    assert found == pytest.approx(float(spread), rel=0.25)


def test_one_example_has_no_halves():
    load = tanh_layers()
    load.batch = load.batch[:1]
    assert batch_noise(load) is None


def test_a_plan_that_rounds_is_near_and_a_bound_below_that_fails():
    found = memfit.verify(tanh_layers(), "80%", steps=1, **SHRINK)
    assert found.holds
    assert [action.promise for action in found.plan.actions] == ["approximate"]
    assert found.loss.agreement == "bitwise"
    near = found.approximation
    assert 0 < near.gradient_error < near.batch_noise / 10
    assert "loss bitwise equal, gradients as near as is allowed" in str(found)
    strict = memfit.verify(tanh_layers(), "80%", steps=1, max_error=1e-6, **SHRINK)
    assert not strict.holds
    assert "not what a plan of class approximate promises" in str(strict)


def test_an_exact_plan_says_nothing_of_it():
    found = memfit.verify(tanh_layers(), "80%", steps=1, forbid=SHRINK["forbid"][1:])
    assert found.holds
    assert found.approximation is None


@pytest.mark.parametrize("max_error", [0.0, -1.0, math.nan, math.inf, "10%"])
def test_a_bound_that_is_none_is_refused(max_error):
    with pytest.raises(UsageError, match="is no part of anything"):
        memfit.verify(tanh_layers(), "80%", max_error=max_error)


def normalised_convolution():
    """A convolution whose bias the normalisation after it takes away again."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 64, 4)
    )
    batch = (torch.randn(8, 3, 8, 8), torch.randint(4, (8,)))
    return memfit.Workload(
        model,
        batch,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.Adam(model.parameters()),
    )


def test_updates_of_what_the_loss_does_not_depend_on_are_left_out_and_named():
    forbid = ("remat", "fuse_optimizer", "one_by_one", "chunk", "micro_batch")
    found = memfit.verify(
        normalised_convolution(), "90%", steps=1, allow="optimizer_bits", forbid=forbid
    )
    assert found.approximation.idle_parameters == ("0.bias",)
    assert "`0.bias` is left out: the loss does not depend on it" in str(found)


def test_a_faint_gradient_alone_leaves_nothing_out():
    load = normalised_convolution()
    load.loss(load.model, load.batch).backward()
    gradients = {name: p.grad for name, p in load.model.named_parameters()}
    before = {name: p.detach().clone() for name, p in load.model.named_parameters()}
    load.optimizer.step()
    after = {name: p.detach().clone() for name, p in load.model.named_parameters()}
    moved = []

    def changed():
        moved.append({n: not torch.equal(p, after[n]) for n, p in load.model.named_parameters()})
        return False

    assert idle_parameters(load, gradients, before, after, changed) == []
    assert [[name for name, it in one.items() if it] for one in moved] == [["0.bias"]]
    assert idle_parameters(load, gradients, before, after, lambda: True) == ["0.bias"]
    assert all(torch.equal(p, after[name]) for name, p in load.model.named_parameters())


def test_an_update_that_is_left_out_does_not_count():
    before = {"a": torch.zeros(2), "b": torch.zeros(1)}
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    got = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([-1.0])}
    assert update_error(before, expected, got, ["b"]) == pytest.approx(0.1)
    assert update_error(before, expected, got) == pytest.approx(math.sqrt(4.25 / 26))
