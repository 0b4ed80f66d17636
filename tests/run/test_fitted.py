"""One planned step from outside: whole steps, own loops, errors, planning again."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from handmade import record
from torch import nn

import memfit
from memfit.apply.remat.remat import Rematerialiser
from memfit.errors import DivergenceWarning, UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import MAX_REPLANS, Fitted
from memfit.workload import Workload

NOTHING = {"actions": []}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 3)
        self.extra = False

    def forward(self, x):
        h = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2)
        if self.extra:
            h = h.sin()
        return self.last(h)


def square(model, batch):
    return model(batch).pow(2).mean()


def workload(model=None, **more):
    torch.manual_seed(0)
    return Workload(
        model or Net(),
        torch.randn(8, 6),
        square,
        lambda p: torch.optim.AdamW(p, lr=0.1),
        **more,
    )


def remat_plan(load, batch=None):
    batch = load.batch if batch is None else batch
    return record(load.model, lambda: square(load.model, batch)).plan()


def run(load, plan, steps=3):
    fitted = Fitted(load, plan)
    torch.manual_seed(4)
    losses = [fitted.step() for _ in range(steps)]
    return [*losses, *load.model.parameters(), *load.model.buffers()], fitted


@pytest.mark.parametrize("more", [{}, {"clip_grad_norm": 0.1}, {"autocast": torch.bfloat16}])
def test_whole_steps_are_bitwise(more):
    expected, _ = run(workload(**more), NOTHING)
    load = workload(**more)
    if "autocast" in more:

        def loss(model, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return square(model, batch)

        plan = record(load.model, lambda: loss(load.model, load.batch)).plan()
    else:
        plan = remat_plan(load)
    got, fitted = run(load, plan)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    report = fitted.report()
    assert report.steps == 3
    assert report.dropped_saves > 3
    assert report.replayed_ops > 3
    assert not report.diverged
    assert not got[0].requires_grad


def test_remat_with_the_optimizer_inside_backward_is_bitwise():
    expected, _ = run(workload(), NOTHING)
    load = workload()
    plan = remat_plan(load)
    plan["actions"].insert(
        0, {"kind": "fuse_optimizer", "promise": "exact", "count": 1, "bytes": 0}
    )
    got, _ = run(load, plan)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_remat_inside_micro_batches_equals_micro_batches_alone():
    cut = {"kind": "micro_batch", "promise": "equivalent", "count": 2, "bytes": 0}
    expected, _ = run(workload(), {"actions": [cut]})
    load = workload()
    plan = remat_plan(load, load.batch[:4])
    plan["actions"].insert(0, cut)
    got, fitted = run(load, plan)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not fitted.report().diverged


def test_without_an_optimizer_gradients_are_let_go():
    load = workload()
    load.optimizer = None
    fitted = Fitted(load, NOTHING)
    assert fitted.optimizer is None
    fitted.step()
    assert all(p.grad is None for p in load.model.parameters())


def test_inference_returns_what_the_forward_returns():
    model = nn.Linear(6, 2)
    load = Workload(model, torch.randn(3, 6))
    result = Fitted(load, NOTHING).step()
    assert torch.equal(result, model(load.batch))
    assert not result.requires_grad
    with pytest.raises(UsageError, match="no loss"):
        Fitted(load, {"actions": [{"kind": "remat"}]})


def test_constructing_touches_neither_parameters_nor_random_state():
    load = workload()
    plan = remat_plan(load)
    before = copy.deepcopy(load.model.state_dict())
    random = torch.get_rng_state()
    Fitted(load, plan)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in load.model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in load.model.modules())


def test_an_empty_plan_installs_nothing():
    load = workload()
    seen = []

    def loss(model, batch):
        seen.append(
            (
                torch._C._len_torch_dispatch_stack(),
                torch._C._autograd._top_saved_tensors_default_hooks(False),  # noqa: FBT003
                any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()),
            )
        )
        return square(model, batch)

    load.loss = loss
    Fitted(load, NOTHING).step()
    assert seen == [(0, None, False)]


def test_a_closed_one_runs_no_step():
    load = workload()
    with Fitted(load, remat_plan(load)) as fitted:
        fitted.step()
    with pytest.raises(UsageError, match="closed"):
        fitted.step()
    with pytest.raises(UsageError, match="closed"), fitted.forward():
        pass


def test_an_own_loop():
    expected, _ = run(workload(), NOTHING)
    load = workload()
    fitted = Fitted(load, remat_plan(load))
    torch.manual_seed(4)
    losses = []
    for _ in range(3):
        with fitted.forward():
            loss = square(load.model, load.batch)
        loss.backward()
        fitted.optimizer.step()
        fitted.optimizer.zero_grad()
        losses.append(loss.detach())
    got = [*losses, *load.model.parameters(), *load.model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert fitted.report().steps == 3


@pytest.mark.parametrize("kind", ["fuse_optimizer", "micro_batch"])
def test_an_own_loop_refuses_what_lives_outside_forward(kind):
    plan = {"actions": [{"kind": kind, "promise": "exact", "count": 2, "bytes": 0}]}
    fitted = Fitted(workload(), plan)
    with pytest.raises(UsageError, match="own_loop=True"), fitted.forward():
        pass


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"actions": [{"kind": "pray"}]},
        {"actions": [{"kind": "remat"}]},
        {"actions": [{"kind": "micro_batch", "count": 0}]},
    ],
)
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(UsageError):
        Fitted(workload(), plan)


def test_the_users_exception_passes_through_and_parameters_stay():
    load = workload()
    fitted = Fitted(load, remat_plan(load))
    before = copy.deepcopy(load.model.state_dict())

    def fail(_module, _args):
        raise ZeroDivisionError("mine")

    handle = load.model.last.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="mine"):
        fitted.step()
    handle.remove()
    after = load.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if "norm" not in k)
    fitted.step()
    assert fitted.report().steps == 1


def test_divergence_is_planned_again_and_then_followed():
    load = workload()
    asked = []

    def replan(batch):
        asked.append(batch)
        return remat_plan(load, batch)

    fitted = Fitted(load, remat_plan(load), replan=replan)
    fitted.step()
    assert asked == []
    load.model.extra = True
    with pytest.warns(DivergenceWarning):
        fitted.step()
    assert fitted.report().diverged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.step()
        fitted.step()
    report = fitted.report()
    assert len(asked) == 1
    assert not report.diverged
    assert report.replans == 1


def test_planning_again_ends_where_it_does_not_help():
    load = workload()
    plan = remat_plan(load)
    asked = []

    def replan(batch):
        asked.append(batch)
        return plan

    fitted = Fitted(load, plan, replan=replan)
    load.model.extra = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(6):
            fitted.step()
    assert len(asked) == MAX_REPLANS


def test_each_batch_shape_gets_its_own_plan():
    load = workload()
    larger = torch.randn(20, 6)
    asked = []

    def replan(batch):
        asked.append(batch.shape[0])
        return remat_plan(load, batch)

    fitted = Fitted(load, remat_plan(load), replan=replan)
    with pytest.warns(DivergenceWarning, match="elements instead"):
        fitted.step(larger)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            fitted.step()
            fitted.step(larger)
            fitted.step(load.batch[:5])
    assert asked == [20]


def test_a_rematerialiser_warns_once_only():
    load = workload()
    remat = Rematerialiser(load.model, remat_plan(load)["actions"][0]["remat"])
    load.model.extra = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with remat.forward():
                square(load.model, load.batch).backward()
    assert len([w for w in caught if w.category is DivergenceWarning]) == 1


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layers = kind(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        return self.head(self.layers(self.words(x))[0])


def recurrent(kind):
    torch.manual_seed(0)
    return Workload(
        Recurrent(kind),
        torch.randint(0, 50, (16, 24)),
        lambda m, b: nn.functional.cross_entropy(m(b).flatten(0, 1), b.flatten()),
        torch.optim.SGD,
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_recurrent_layers_in_an_own_loop_are_where_the_plan_expects_them(kind):
    """oneDNN's layers return a workspace of a size that fakes do not know."""
    peak = memfit.predict(recurrent(kind)).predicted_peak_bytes
    fitted = memfit.fit(recurrent(kind), budget=int(0.9 * peak), own_loop=True)
    workload = fitted.workload
    ordinary = recurrent(kind)

    def forward_and_backward():
        with fitted.forward():
            loss = workload.loss(workload.model, workload.batch)
        loss.backward()

    forward_and_backward()  # a warning is an error: the model never leaves the recorded step
    ordinary.loss(ordinary.model, ordinary.batch).backward()
    for ours, theirs in zip(workload.model.parameters(), ordinary.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    workload.model.zero_grad(set_to_none=True)
    measured = measure_peak(forward_and_backward, static_tensors(workload, None))
    assert measured.peak_bytes <= int(0.9 * peak)
    assert fitted.report().replayed_ops > 0


def test_the_json_of_a_plan_is_a_plan():
    load = workload()
    made = memfit.plan(load, "80%")
    assert Fitted(load, json.loads(made.json())).plan == made
    with pytest.raises(UsageError, match="by actions alone: it has no plan"):
        _ = Fitted(load, NOTHING).plan
