"""The optimizer's state in 8 bits: what it takes, what updates it makes, and what others see."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

import memfit
from memfit.apply.executor import Executor, Subject
from memfit.apply.optimizer_in_backward import OneByOne
from memfit.apply.precision.eight_bit_state import EightBitState
from memfit.errors import UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.tensors.moments import parameter_refusal
from memfit.workload import Workload

OTHERS = ("remat", "unneeded_saves", "chunk", "micro_batch")
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.01),
    "uphill": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, maximize=True),
    "SGD": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.01
    ),
    "Nesterov": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, nesterov=True
    ),
}


def workload(optimizer=OPTIMIZERS["AdamW"]):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)]
    return Workload(
        nn.Sequential(*layers),
        torch.randn(64, 128),
        lambda model, batch: model(batch).square().mean(),
        optimizer,
    )


def plan_of(load, kinds=()):
    """A plan with all large parameters' state in 8 bits, and actions of some kinds besides."""
    names = [name for name, p in load.model.named_parameters() if p.numel() >= 4096]
    narrow = {"kind": "optimizer_bits", "optimizer_bits": {"names": names}}
    return {"actions": [*({"kind": kind} for kind in kinds), narrow]}


def parameters_after(load, plan, steps):
    with Fitted(load, plan) as fitted:
        for _ in range(steps):
            fitted.step()
    return [p.detach().clone() for p in load.model.parameters()]


def moments(optimizer):
    return [state for state in optimizer.state.values() if isinstance(state, EightBitState)]


@pytest.mark.parametrize("forbid", [("fuse_optimizer",), ()])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_it_is_planned_with_leave_alone_and_peaks_are_those_predicted(name, forbid):
    load = workload(OPTIMIZERS[name])
    budget = "90%" if forbid else {"AdamW": "60%", "SGD": "75%"}[name]
    forbid = (*OTHERS, *forbid)
    assert not memfit.plan(load, budget, forbid=forbid).fits
    made = memfit.plan(load, budget, forbid=forbid, allow="optimizer_bits")
    assert (made.fits, made.promise) == (True, "approximate")
    (action,) = [action for action in made.actions if action.kind == "optimizer_bits"]
    assert action.count == 6
    assert "optimizer state of 6 parameters in 8 bits" in str(made)
    with Fitted(load, made) as fitted:
        fitted.step()
        static = static_tensors(load, fitted.optimizer)
        measured = measure_peak(fitted.step, static)
        assert len(moments(fitted.optimizer)) == 6
    assert measured.peak_bytes == made.planned.predicted_peak_bytes
    assert measured.left_bytes == 0


def test_a_moment_takes_a_byte_a_number_and_a_scale_for_each_block():
    load = workload()
    with Fitted(load, plan_of(load)) as fitted:
        fitted.step()
        (state, *_) = moments(fitted.optimizer)
        held = state.in_memory()
    numbers = 128 * 128
    assert held["exp_avg"].nbytes == held["exp_avg_sq"].nbytes == numbers + 4 * numbers // 256


@pytest.mark.parametrize("kinds", [(), ("fuse_optimizer",)])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_first_step_is_torchs_and_others_are_near(name, kinds):
    def after(plan, steps):
        load = workload(OPTIMIZERS[name])
        return parameters_after(load, plan(load) if plan else {"actions": []}, steps)

    before = [p.detach() for p in workload().model.parameters()]
    for steps, most in ((1, 1e-4), (10, 0.1)):
        expected = after(None, steps)
        found = after(lambda load: plan_of(load, kinds), steps)
        for start, wide, narrow in zip(before, expected, found, strict=True):
            assert (narrow - wide).norm() <= most * (wide - start).norm()


def test_the_same_steps_give_the_same_bits_on_any_number_of_threads():
    threads = torch.get_num_threads()
    load = workload()
    first = parameters_after(load, plan_of(load), 3)
    try:
        torch.set_num_threads(3)
        again = workload()
        second = parameters_after(again, plan_of(again, ("fuse_optimizer",)), 3)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(first, second, strict=True):
        assert (a - b).abs().max() < 1e-6  # products on more threads may be summed otherwise


@pytest.mark.parametrize(("way", "steps"), [({}, 1), ({"fused": True}, 1), ({"foreach": True}, 6)])
def test_what_is_left_to_torch_is_updated_at_once_where_that_takes_no_more_memory(
    way, steps, monkeypatch
):
    """The biases of six layers, as torch alone updates them: by one step, or by one each."""

    def make(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, **way)

    load, plain = workload(make), workload()
    step_over, counts = OneByOne._step_over, []

    def counted(one_by_one, updated):
        counts.append(len(updated))
        step_over(one_by_one, updated)

    monkeypatch.setattr(OneByOne, "_step_over", counted)
    with Fitted(load, plan_of(load)) as fitted:
        fitted.step()
        fitted.step()
        states = [state for state in fitted.optimizer.state.values() if type(state) is dict]
        assert [state["step"].item() for state in states] == [2.0] * 6
    assert (len(counts), sum(counts)) == (2 * steps, 12)

    own = make(plain.model.parameters())
    loss = plain.loss(plain.model, plain.batch)
    loss.backward()
    own.step()
    once = workload(make)
    with Fitted(once, plan_of(once)) as fitted:
        fitted.step()
    for a, b in zip(plain.model.parameters(), once.model.parameters(), strict=True):
        if a.numel() < 4096:
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_goes_by_the_settings_of_its_groups(name: str):
    """As a scheduler changes them: what is the same for all of a step is learnt in each."""
    load = workload(OPTIMIZERS[name])
    with Fitted(load, plan_of(load)) as fitted:
        for rate in (1e-3, 1e-3, 0.0, 1e-3):
            for group in fitted.optimizer.param_groups:
                group["lr"] = rate
            before = [p.detach().clone() for p in load.model.parameters()]
            fitted.step()
            stayed = [
                torch.equal(a, b) for a, b in zip(before, load.model.parameters(), strict=True)
            ]
            assert all(stayed) if rate == 0.0 else not any(stayed)


def test_others_see_a_plain_optimizer():
    load = workload()
    with Fitted(load, plan_of(load)) as fitted:
        optimizer = fitted.optimizer
        fitted.place_state()
        assert optimizer.state_dict()["state"] == {}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        fitted.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 5e-4
        saved = optimizer.state_dict()
        assert all(type(state) is dict for state in saved["state"].values())
        assert saved["state"][0]["exp_avg"].shape == (128, 128)
        assert saved["state"][0]["exp_avg"].dtype is torch.float32
        assert len(moments(optimizer)) == 6, "looking changed nothing"
        assert moments(optimizer)[0].is_narrow(optimizer)
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
            assert not moments(copied)
    plain = torch.optim.AdamW(workload().model.parameters())
    plain.load_state_dict(saved)
    plain.step()
    assert not moments(fitted.optimizer), "closed, it is at home"


def test_what_is_saved_and_loaded_goes_on_in_the_same_bits():
    load = workload()
    with Fitted(load, plan_of(load)) as fitted:
        fitted.step()
        fitted.step()
        saved = copy.deepcopy((load.model.state_dict(), fitted.optimizer.state_dict()))
        fitted.step()
    other = workload()
    with Fitted(other, plan_of(other)) as fitted:
        other.model.load_state_dict(saved[0])
        fitted.optimizer.load_state_dict(saved[1])
        del saved  # who keeps what was loaded keeps it wide
        fitted.step()
        assert len(moments(fitted.optimizer)) == 6
    for a, b in zip(load.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_somebody_reads_is_wide_until_the_next_step_and_writing_to_it_counts():
    load = workload()
    with Fitted(load, plan_of(load)) as fitted:
        fitted.step()
        (state, *_) = moments(fitted.optimizer)
        state["exp_avg"].zero_()
        assert not state.is_narrow(fitted.optimizer)
        fitted.place_state()
        assert state.is_narrow(fitted.optimizer)
        assert not state.plain()["exp_avg"].any()
        kept = state["exp_avg"]
        fitted.step()  # by torch's own update, as it is kept
        assert kept.any()
        assert not state.is_narrow(fitted.optimizer)
        del kept
        fitted.step()
        assert state.is_narrow(fitted.optimizer)


def test_another_plan_finds_it_at_home():
    load = workload()
    with Fitted(load, plan_of(load)) as fitted:
        fitted.step()
        fitted.follow({"actions": [{"kind": "one_by_one"}]})
        fitted.step()
        assert not moments(fitted.optimizer)
        assert float(fitted.optimizer.state[next(load.model.parameters())]["step"]) == 2


def test_a_gradient_that_is_not_finite_is_not_hidden():
    load = workload()
    load.batch = torch.full((64, 128), float("nan"))
    assert all(p.isnan().any() for p in parameters_after(load, plan_of(load), 1))


REFUSED = {
    "`RMSprop` has no form in 8 bits": torch.optim.RMSprop,
    "`AdamW` with `amsgrad` has no form in 8 bits": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "`SGD` without momentum keeps no state": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("said", list(REFUSED))
def test_what_has_no_such_form_is_refused_by_name(said):
    load = workload(REFUSED[said])
    made = memfit.plan(load, "70%", allow="optimizer_bits")
    reasons = {refusal.kind: refusal.reason for refusal in made.refusals}
    assert said in reasons["optimizer_bits"]
    with pytest.raises(UsageError, match="plan again for this workload"):
        Executor(
            plan_of(load), Subject(weakref.ref(load.model), REFUSED[said](load.model.parameters()))
        )


def test_own_loops_and_small_parameters_are_refused_by_a_sentence():
    def reason(load, **more):
        made = memfit.plan(load, "70%", allow="optimizer_bits", **more)
        reasons = {refusal.kind: refusal.reason for refusal in made.refusals}
        return reasons["optimizer_bits"]

    assert reason(workload(), own_loop=True) == "the optimizer is called by the user's own loop"
    small = workload()
    small.model = nn.Sequential(nn.Linear(128, 31), nn.Tanh(), nn.Linear(31, 128))
    assert "no parameter of 4,096 numbers" in reason(small)


def test_parameters_are_refused_where_the_kernel_cannot_reach_them():
    said = parameter_refusal(torch.empty(64, 64, device="meta"))
    assert "is on `meta`, where memfit makes no updates of state in 8 bits" in said
    assert "is of type torch.float64" in parameter_refusal(torch.empty(8, dtype=torch.float64))
    assert "does not lie densely" in parameter_refusal(torch.zeros(1, 64).expand(64, 64))


def test_numbers_may_lie_in_another_order_than_their_dimensions():
    def load():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 16, 3))
        model = model.to(memory_format=torch.channels_last)
        batch = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
        return Workload(model, batch, lambda model, x: model(x).square().mean(), torch.optim.AdamW)

    expected = parameters_after(load(), {"actions": []}, 5)
    narrow = load()
    with Fitted(narrow, plan_of(narrow)) as fitted:
        for _ in range(5):
            fitted.step()
        assert len(moments(fitted.optimizer)) == 2
        assert all(state.is_narrow(fitted.optimizer) for state in moments(fitted.optimizer))
    for wide, found, start in zip(
        expected, narrow.model.parameters(), load().model.parameters(), strict=True
    ):
        assert (found - wide).norm() <= 0.1 * (wide - start).norm()


def test_a_dimension_of_one_may_have_any_stride():
    """Depthwise convolutions give gradients with strides of (49, 1, 7, 1), for (49, 49, 7, 1)."""
    torch.manual_seed(0)
    model = nn.Conv2d(96, 96, 7, padding=3, groups=96)
    load = Workload(
        model,
        torch.randn(8, 96, 16, 16).to(memory_format=torch.channels_last),
        lambda model, batch: model(batch).square().mean(),
        OPTIMIZERS["AdamW"],
    )
    plan = plan_of(load, ["fuse_optimizer"])
    with Fitted(load, plan) as fitted:
        fitted.step()
        assert fitted.optimizer.state[model.weight].is_narrow(fitted.optimizer), (
            "updated in 32 bits"
        )


def test_verify_says_what_it_found():
    found = memfit.verify(workload(), "60%", steps=1, forbid=OTHERS, allow="optimizer_bits")
    assert found.holds
    assert found.loss.agreement == found.gradients.agreement == "bitwise"
    assert 0 < found.approximation.update_error < 0.1
    assert found.approximation.update_steps == 5
    assert "gradients  bitwise equal" in str(found)
    assert "updates    after 5 steps parameters are off by" in str(found)
    assert "of the first step bitwise equal, updates as near as is allowed" in str(found)
