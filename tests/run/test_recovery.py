"""Refused steps of a fitted workload: put back, planned again, the same as if nothing had been."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from alone import alone
from torch import Tensor, nn

import memfit
from memfit import _native
from memfit.run.fitted import Fitted
from memfit.run.recovery import Recovery
from memfit.run.step_backup import BeforeStep, Buffers
from memfit.schema import FuseOptimizerAction
from memfit.track import cpu

KIB = 1 << 10
WIDTH, ROWS = 64, 256


class Block(nn.Module):
    """Everything a step may change: BatchNorm's buffers, dropout's draws, a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(torch.tanh(self.norm(self.linear(x))), 0.1, self.training)
        return torch.sigmoid(x) * torch.tanh(x) + self.constant[0]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(6)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def workload(net: nn.Module, optimizer: Any = None, rows: int = ROWS) -> memfit.Workload:
    torch.manual_seed(5)
    optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2))
    batch = torch.randn(rows, WIDTH)
    return memfit.Workload(model=net, batch=batch, loss=loss, optimizer=optimizer)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """All that a step may change, as values."""
    found: list[Any] = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    found += [t.detach().clone() for t in net.state_dict().values()]
    if optimizer is not None:
        found.append(copy.deepcopy(optimizer.state_dict()))
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.fixture(autouse=True)
def counting() -> None:
    assert cpu.start() is None
    gc.collect()


def guarded(net: nn.Module, size: int, **choices: Any) -> Fitted:
    """The workload, planned for more than there is besides what the process holds already."""
    return memfit.fit(workload(net), size, guard=True, **choices)


def needed(net: nn.Module) -> int:
    """Unplanned peak of the step."""
    return int(memfit.plan(workload(net), "100%").unplanned.predicted_peak_bytes)


def test_a_recovered_step_is_the_eager_one_bit_for_bit():
    """Something else in the process takes a third of the budget that the plan counted on."""
    eager, net = model(), model()
    peak = needed(net)
    reference = Fitted(workload(eager), {"actions": []})
    budget = _native.taken_bytes() + int(peak * 1.1)
    fitted = guarded(net, budget)
    assert not [a for a in fitted.plan.actions if a.kind == "remat"]
    torch.manual_seed(11)
    want = [reference.step() for _ in range(3)]
    ballast = torch.empty(budget - _native.taken_bytes() - int(peak * 0.75), dtype=torch.uint8)
    torch.manual_seed(11)
    with pytest.warns(memfit.RecoveryWarning, match="by a plan with a peak of") as told:
        got = [fitted.step()]
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got += [fitted.step() for _ in range(2)]
    assert same(got, want)
    after = everything(net, fitted.optimizer)
    assert same(after[3:], everything(eager, reference.optimizer)[3:])
    assert int(net[0].calls) == 3
    report = fitted.report()
    assert (report.recovered_steps, report.steps) == (1, 3)
    assert 1 <= report.refused_attempts <= 3
    assert [a for a in fitted.plan.actions if a.kind == "remat"]
    assert all(p.grad is None for p in net.parameters())
    fitted.close()
    del ballast


def test_a_step_that_nothing_can_save_leaves_everything_as_before():
    net = model()
    peak = needed(net)
    budget = _native.taken_bytes() + int(peak * 1.1)
    fitted = guarded(net, budget)
    fitted.step()
    torch.manual_seed(7)
    before = everything(net, fitted.optimizer)
    ballast = torch.empty(budget - _native.taken_bytes() - 40 * KIB, dtype=torch.uint8)
    with pytest.raises(memfit.OutOfBudget) as caught:
        fitted.step()
    assert same(everything(net, fitted.optimizer), before)
    assert all(p.grad is None for p in net.parameters())
    notes = "\n".join(caught.value.__notes__)
    assert "everything is as before the step" in notes
    assert "no allowed plan has a peak of" in notes
    assert caught.value.plan is None
    assert caught.value.budget_bytes == budget
    # The guard is on during steps only, and room makes the step possible again.
    assert torch.empty(budget).numel() == budget
    del ballast
    fitted.step()
    assert int(net[0].calls) == 2
    fitted.close()


def test_a_step_refused_while_the_optimizer_makes_its_state_is_recovered():
    """Half of AdamW's state is there when memory runs out; no parameter is updated yet."""
    eager, net = model(), model()
    reference = Fitted(workload(eager), {"actions": []})
    torch.manual_seed(11)
    want = reference.step()
    plan = memfit.plan(workload(model()), "100%")
    room = 1 << 20
    ballast: list[Tensor] = []
    work = workload(net)
    states: list[int] = []

    class Filled(torch.optim.AdamW):
        """Someone else takes what is left just before the state is made."""

        def _init_group(self, *args: Any, **kwargs: Any) -> Any:
            if not ballast:
                free = fitted_budget - _native.taken_bytes() - 60 * KIB
                ballast.append(torch.empty(free, dtype=torch.uint8))
            try:
                return super()._init_group(*args, **kwargs)
            finally:
                states.append(len(self.state))

    Filled.__module__ = torch.optim.AdamW.__module__

    def within(batch: Any, budget_bytes: int) -> memfit.Plan:
        assert fitted.optimizer is not None
        assert not fitted.optimizer.state
        ballast[0] = torch.empty(0)
        return plan

    fitted_budget = _native.taken_bytes() + int(plan.unplanned.predicted_peak_bytes) + room
    work = workload(net, lambda p: Filled(p, lr=1e-2))
    fitted = Fitted(work, plan, recovery=Recovery(work, fitted_budget, within))
    torch.manual_seed(11)
    with pytest.warns(memfit.RecoveryWarning):
        got = fitted.step()
    assert 0 < states[0] < states[-1]
    assert same(got, want)
    assert same(net.state_dict(), eager.state_dict())
    fitted.close()


def test_updated_parameters_are_said_and_not_run_again():
    """An optimizer inside backward has updated some when memory runs out."""
    net = model()
    refuse = [False]

    def update(gradient: Tensor) -> Tensor:
        if refuse[0]:
            torch.empty(1 << 30, dtype=torch.uint8)
        return gradient

    fused = FuseOptimizerAction(kind="fuse_optimizer", promise="exact", count=1, bytes=0)
    plan = memfit.plan(workload(net), "100%")
    budget = _native.taken_bytes() + 100 * (1 << 20)
    work = workload(net)
    recovery = Recovery(work, budget, lambda *_: plan)
    fitted = Fitted(work, replace(plan, actions=(fused,)), recovery=recovery)
    fitted.step()
    net[0].linear.weight.register_hook(update)
    refuse[0] = True
    with pytest.raises(memfit.OutOfBudget) as caught:
        fitted.step()
    assert any("parameters were updated by then" in note for note in caught.value.__notes__)
    assert caught.value.plan is plan
    assert fitted.report().recovered_steps == 0
    fitted.close()


def test_retries_end():
    net = model()
    plan = memfit.plan(workload(net), "100%")
    asked: list[int] = []

    def within(batch: Any, budget_bytes: int) -> memfit.Plan:
        asked.append(budget_bytes)
        return plan

    work = workload(net)
    before = everything(net, None)
    budget = _native.taken_bytes() + 100 * KIB
    fitted = Fitted(work, plan, recovery=Recovery(work, budget, within))
    with pytest.raises(memfit.OutOfBudget) as caught:
        fitted.step()
    assert same(everything(net, None), before)
    assert fitted.report().refused_attempts == 4
    assert any("tried 4 times" in note for note in caught.value.__notes__)
    assert len(asked) == 4
    fitted.close()


def test_other_errors_of_a_guarded_step_are_not_retried():
    net = model()
    fitted = guarded(net, _native.taken_bytes() + 2 * needed(net))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        fitted.step(torch.randn(ROWS, WIDTH + 1))
    assert not isinstance(caught.value, memfit.OutOfBudget)
    assert fitted.report().refused_attempts == 0
    fitted.close()


def test_a_larger_batch_than_planned_is_recovered_by_a_plan_of_its_own():
    eager, net = model(), model()
    budget = _native.taken_bytes() + int(needed(net) * 1.5)
    fitted = guarded(net, budget)
    large = torch.randn(2 * ROWS, WIDTH)
    reference = Fitted(workload(eager), {"actions": []})
    torch.manual_seed(1)
    want = reference.step(large)
    torch.manual_seed(1)
    with pytest.warns(memfit.RecoveryWarning):
        got = fitted.step(large)
    assert same(got, want)
    assert same(net.state_dict(), eager.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.step()
    fitted.close()


def test_large_constants_are_copied_once_and_everything_is_put_back():
    net = model()
    net.register_buffer("mask", torch.zeros(600, 600))
    buffers = Buffers(net)
    first = BeforeStep(buffers, net, None)
    loss(net, torch.randn(ROWS, WIDTH))
    first.completed()
    second = BeforeStep(buffers, net, None)
    assert [b.name for b in second._buffers_before if b.copy is None] == ["mask"]
    before = everything(net, None)
    random.random()
    np.random.random()
    kept = net[0].calls
    net[0].calls = torch.tensor(99)
    loss(net, torch.randn(ROWS, WIDTH))
    changed = everything(net, None)
    # Batch norm's statistics among them, whose changes torch does not count.
    assert not same(changed[3:], before[3:])
    assert not any(same(changed[k], before[k]) for k in range(3))
    assert second.restore(has_begun=False) == ""
    assert same(everything(net, None), before)
    assert net[0].calls is kept
    net.mask.add_(1)
    assert "the module buffer `mask` changed" in second.restore(has_begun=False)


class Silent(torch.optim.SGD):
    """Updates as older optimizers do: torch counts no change of the parameter."""

    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


OPTIMIZERS = {
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "all at once": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "factored": torch.optim.Adafactor,
    "silent": Silent,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_parameters_is_never_taken_for_none(name: str):
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    for _ in range(2):
        before = BeforeStep(Buffers(net), net, optimizer)
        loss(net, torch.randn(ROWS, WIDTH)).backward()
        assert before.restore(has_begun=False) == ""
        optimizer.step()
        said = before.restore(has_begun=True)
        assert "parameters were updated by then" in said or "had begun its step" in said


def test_a_guard_goes_with_whole_eager_steps_only():
    net = model()
    for choice in ({"own_loop": True}, {"compile": True}):
        with pytest.raises(memfit.UsageError, match="whole eager steps"):
            memfit.fit(workload(net), "100%", guard=True, **choice)


@pytest.mark.offloads_parameters
def test_a_budget_below_the_model_itself_is_held_with_its_parameters_elsewhere(tmp_path):
    seen = alone(
        f"""
        from memfit.run.fitted import Fitted

        def wide():
            torch.manual_seed(0)
            nn = torch.nn
            layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)]
            loss = lambda model, batch: model(batch).square().mean()
            make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
            return memfit.Workload(torch.nn.Sequential(*layers), torch.randn(4, 256), loss, make)

        workload = wide()
        size = sum(p.nbytes for p in workload.model.parameters())
        unplanned = memfit.plan(workload, "100%").unplanned.predicted_peak_bytes
        budget = min(unplanned * 22 // 100, size - 1)
        fitted = memfit.fit(workload, budget, offload={str(tmp_path)!r}, guard=True)
        kinds = [action.kind for action in fitted.plan.actions]
        for step in range(3):
            fitted.step()
        taken = _native.taken_bytes()
        fitted.close()
        planned = [p.detach().clone() for p in workload.model.parameters()]
        eager = wide()
        reference = Fitted(eager, {{"actions": []}})
        for step in range(3):
            reference.step()
        same = all(torch.equal(p, q) for p, q in zip(planned, eager.model.parameters()))
        answer(kinds=kinds, taken=taken, budget=budget, same=same)
        """
    )
    assert "offload_parameters" in seen["kinds"]
    assert seen["taken"] < seen["budget"]
    assert seen["same"]
