"""Activations held in fewer bits: the forms, what stays exact, and what is left alone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from treated import Treated
from workloads import tanh_layers

import memfit
from memfit.apply.executor import Executor, Subject
from memfit.apply.offload.tiers import Parcel
from memfit.apply.precision.narrow import NarrowTier, expand_by_ops, shrink_by_ops
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.workload import Workload

BYTES = {"half": lambda count: 2 * count, "eight_bit": lambda count: count + 4 * -(-count // 256)}


def numbers(count, seed=0):
    """Numbers of very different sizes, a few of them not finite."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=generator)
    made *= 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    if count > 600:
        made[[3, 300, 301]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
        made[512:600] = 0
    return made


def back(parcel: Parcel, count):
    target = torch.empty(4 * count, dtype=torch.uint8)
    parcel.fetch(target)
    return target.view(torch.float32)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000, (1 << 20) + 300])
def test_the_kernel_and_torchs_ops_write_the_same_bits(count):
    wide = numbers(count)
    parcel = NarrowTier("eight_bit").send(wide)
    held = torch.empty_like(parcel._held)
    shrink_by_ops(wide, held)
    assert torch.equal(held, parcel._held)
    expanded = torch.empty(count)
    expand_by_ops(held, expanded)
    assert torch.equal(expanded.view(torch.int32), back(parcel, count).view(torch.int32))


@pytest.mark.parametrize("form", ["half", "eight_bit"])
@pytest.mark.parametrize("count", [1, 300, 5000])
def test_what_comes_back_is_near_and_what_is_not_finite_stays(form, count):
    wide = numbers(count)
    parcel = NarrowTier(form).send(wide[:7] if count > 7 else wide)  # all of the storage goes
    assert parcel._held.nbytes == BYTES[form](count)
    found = back(parcel, count)
    finite = wide.isfinite()
    assert torch.equal(found.isnan(), wide.isnan())
    assert torch.equal(found[wide.isinf()], wide[wide.isinf()])
    largest = torch.where(finite, wide, 0).abs()
    limit = largest / 256 if form == "half" else torch.full_like(wide, largest.max() / 248 * 1.001)
    assert ((found - wide).abs()[finite] <= limit[finite]).all()


class Chain(nn.Module):
    def __init__(self, after=lambda x: x):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 64)
        self.after = after

    def forward(self, x):
        return self.second(self.after(torch.tanh(self.first(x))))


def workload(after=lambda x: x):
    torch.manual_seed(0)
    return Workload(
        Chain(after),
        torch.randn(128, 64),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def all_shrunk(load, form="eighths"):
    """The plan that holds all it can in one form."""
    trace = memfit.trace(load)
    shrinkable = Treated(trace).evaluate()["shrinkable"]
    assert len(shrinkable) >= 2
    return Treated(trace, **{form: dict.fromkeys(shrinkable)}).plan()


def step(load, plan):
    """The loss of one step, its gradients, and the executor that ran it."""
    load.model.zero_grad()
    executor = Executor(plan, Subject(weakref.ref(load.model), warn=False))
    torch.manual_seed(3)
    with executor.forward():
        loss = load.loss(load.model, load.batch)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in load.model.parameters()], executor.remat


def far(a, b):
    """How far gradients are from others, as a part of their length."""
    a, b = torch.cat([g.flatten() for g in a]), torch.cat([g.flatten() for g in b])
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize(
    ("form", "least", "most"), [("halves", 1e-5, 4e-3), ("eighths", 1e-4, 2e-2)]
)
def test_the_loss_is_exact_and_gradients_are_near(form, least, most):
    load = workload()
    loss, expected, _ = step(load, {"actions": []})
    shrunk, got, remat = step(load, all_shrunk(load, form))
    assert torch.equal(loss, shrunk)
    assert least < far(expected, got) < most
    assert remat.outcome().shrunk >= 2
    assert remat.outcome().observations.shrunk_saves >= remat.outcome().shrunk


def test_the_same_step_gives_the_same_bits_again():
    load = workload()
    plan = all_shrunk(load)
    (_, first, _), (_, second, _) = step(load, plan), step(load, plan)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_write_after_it_was_saved_is_autograds_error():
    def spoiled(x):
        y = torch.tanh(x)
        with torch.no_grad():
            y.mul_(2)
        return y

    load = workload()
    plan = all_shrunk(load)
    load.model.after = spoiled
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(load, plan)


def test_numbers_of_another_type_stay_as_they_are():
    load = workload()
    plan = all_shrunk(load)
    load.model.double()
    load.batch = load.batch.double()
    loss, expected, _ = step(load, {"actions": []})
    again, got, remat = step(load, plan)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert "another type than float32" in remat.outcome().observations.kept_drops[0]


def test_what_is_seen_as_other_numbers_is_kept_for_that():
    def counted(x):
        return x + x.view(torch.int32).sign()

    load = workload(counted)
    loss, expected, _ = step(load, {"actions": []})
    plain = workload()
    plan = all_shrunk(plain)
    again, got, _ = step(load, plan)
    assert torch.equal(loss, again)
    assert far(expected, got) < 2e-2


def test_nothing_is_left_behind():
    load = workload()
    plan = all_shrunk(load)
    with Fitted(load, plan) as fitted:
        fitted.step()
        static = static_tensors(load, fitted.optimizer)
        measured = measure_peak(fitted.step, static)
    assert measured.left_bytes == 0


OTHERS = ("remat", "fuse_optimizer", "one_by_one", "chunk", "micro_batch", "autocast")


@pytest.mark.parametrize("budget", ["90%", "80%"])
def test_it_is_planned_where_numbers_may_change_and_only_there(budget):
    load = tanh_layers()
    assert not memfit.plan(load, budget, forbid=OTHERS).fits
    made = memfit.plan(load, budget, forbid=OTHERS, allow="approximate")
    assert made.fits
    assert made.promise == "approximate"
    (action,) = made.actions
    assert action.kind == "shrink"
    with Fitted(load, made) as fitted:
        fitted.step()
        static = static_tensors(load, fitted.optimizer)
        measured = measure_peak(fitted.step, static)
        assert fitted.report().shrunk_tensors == action.count
    assert measured.peak_bytes == made.planned.predicted_peak_bytes
