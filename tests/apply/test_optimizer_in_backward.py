"""The optimizer inside backward: the same bits as the ordinary step, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memfit
from memfit.apply.optimizer_in_backward import OneByOne
from memfit.errors import UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.torch_versions import offloaded_parameters_refusal
from memfit.workload import Workload

FUSE = {"actions": [{"kind": "fuse_optimizer", "promise": "exact", "count": 1, "bytes": 0}]}
NOTHING = {"actions": []}

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


class CountsInItsGroup(torch.optim.Optimizer):
    """Keeps a step count in the parameter group, as some optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["step"])


OPTIMIZERS["counts_in_its_group"] = CountsInItsGroup


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 3))
    model[3].bias.requires_grad_(False)  # noqa: FBT003
    return model, torch.randn(9, 6)


def square(model, batch):
    return model(batch).pow(2).mean()


def state_of(fitted):
    state = fitted.optimizer.state
    return [
        dict(state[p].items()) if p in state else {}
        for group in fitted.optimizer.param_groups
        for p in group["params"]
    ]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_parameters_and_state_are_bitwise_after_three_steps(make):
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    ordinary = Fitted(Workload(model, batch, square, make), NOTHING)
    fused = Fitted(Workload(twin, batch, square, make), FUSE)
    for _ in range(3):
        assert torch.equal(ordinary.step(), fused.step())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.grad is None
    for a, b in zip(state_of(ordinary), state_of(fused), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())
    for a, b in zip(ordinary.optimizer.param_groups, fused.optimizer.param_groups, strict=True):
        assert len(a["params"]) == len(b["params"])
        assert {k: v for k, v in a.items() if k != "params"} == {
            k: v for k, v in b.items() if k != "params"
        }


def test_groups_schedulers_and_step_hooks_see_one_step():
    def make(model):
        optimizer = torch.optim.SGD(
            [
                {"params": model[0].parameters(), "lr": 0.5},
                {"params": model[2].parameters(), "lr": 0.1},
            ],
            lr=1.0,
            momentum=0.9,
        )
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    results = []
    for plan in (NOTHING, FUSE):
        model, batch = model_and_batch()
        optimizer, scheduler = make(model)
        steps = []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        fitted = Fitted(Workload(model, batch, square, optimizer), plan)
        for _ in range(3):
            fitted.step()
            scheduler.step()
        assert len(steps) == 3
        results.append([*model.parameters(), torch.tensor(scheduler.get_last_lr())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_shared_parameters_are_updated_once():
    results = []
    for plan in (NOTHING, FUSE):
        torch.manual_seed(0)
        first = nn.Linear(5, 5)
        model = nn.Sequential(first, nn.Tanh(), first)
        workload = Workload(
            model, torch.randn(4, 5), square, lambda p: torch.optim.AdamW(p, lr=0.1)
        )
        fitted = Fitted(workload, plan)
        fitted.step()
        fitted.step()
        results.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_do_not_pile_up():
    torch.manual_seed(0)
    width, layers = 256, 8
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    weight = width * width * 4
    batch = torch.randn(2, width)
    peaks = []
    for plan in (NOTHING, FUSE):
        workload = Workload(model, batch, square, lambda p: torch.optim.SGD(p, lr=0.1))
        fitted = Fitted(workload, plan)
        fitted.step()
        static = static_tensors(workload, fitted.optimizer)
        measured = measure_peak(fitted.step, static)
        assert measured.left_bytes == 0
        peaks.append(measured.peak_bytes - measured.static_bytes)
    assert peaks[0] >= layers * weight
    assert peaks[1] < 2 * weight


def test_what_needs_all_gradients_at_once_is_refused():
    model, batch = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="clip_grad_norm"):
        Fitted(Workload(model, batch, square, optimizer, clip_grad_norm=1.0), FUSE)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="hooks that run before"):
        Fitted(Workload(model, batch, square, optimizer), FUSE)


def test_an_exception_in_backward_leaves_groups_and_hooks_as_they_were():
    model, batch = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("mine")

    fitted = Fitted(
        Workload(model, batch, lambda m, b: m[2](Fails.apply(m[0](b))).sum(), optimizer), FUSE
    )
    with pytest.raises(ValueError, match="mine"):
        fitted.step()
    assert [len(g["params"]) for g in optimizer.param_groups] == [6]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def clip(optimizer, *_):
    """What people attach to a step: it needs every gradient at once."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1e-3)


@contextlib.contextmanager
def attached(how, optimizer):
    """Clipping that belongs to a step, in each of the ways in which people attach it."""
    if how == "hook":
        yield optimizer.register_step_pre_hook(clip)
        return
    if how == "hook of all":
        handle = register_optimizer_step_pre_hook(clip)
        try:
            yield
        finally:
            handle.remove()
        return
    where = optimizer if how == "instance" else type(optimizer)
    step = where.step

    def clipped(*args, **kwargs):
        clip(optimizer)
        return step(*args, **kwargs)

    where.step = functools.wraps(step)(clipped) if how == "class" else clipped
    try:
        yield
    finally:
        if how == "class":
            where.step = step


WAYS = {
    "hook": "`SGD` has hooks that run before its step",
    "hook of all": "all optimizers have hooks before their steps",
    "instance": "the `step` of `SGD` was replaced",
    "class": "`SGD.step` was replaced",
}


@pytest.mark.parametrize("how", WAYS)
def test_code_of_others_around_a_step_is_not_run_once_a_parameter(how):
    """Planned: refused with its reason. Attached after planning: the next step raises."""
    model, batch = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, batch, square, optimizer)
    fitted = Fitted(workload, FUSE)
    fitted.step()
    before = [p.detach().clone() for p in model.parameters()]
    with attached(how, optimizer):
        with pytest.raises(UsageError, match=WAYS[how]):
            fitted.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        refusals = memfit.plan(workload, "1B").refusals
    said = {refusal.kind: refusal.reason for refusal in refusals}
    assert said["fuse_optimizer"] == WAYS[how]
    if how in {"hook of all", "class"}:
        fitted.step()  # what was attached is gone


def test_gradients_that_are_reduced_later_are_not_used_at_once(tmp_path):
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, batch = model_and_batch()
        parallel = nn.parallel.DistributedDataParallel(model)
        workload = Workload(parallel, batch, square, lambda p: torch.optim.SGD(p, lr=0.1))
        with pytest.raises(UsageError, match="reduces gradients after they are complete"):
            Fitted(workload, FUSE)
        Fitted(workload, NOTHING).step()
    finally:
        distributed.destroy_process_group()


def _add_a_group(model, optimizer):
    model.spare = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [model.spare]})


def _list_one_twice(model, optimizer):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight]})


def _swap_one(model, _optimizer):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(12, 6)))


OFFLOAD_PARAMETERS = {
    "tier": "disk",
    "room_bytes": 0,
    "ahead_bytes": 0,
    "names": ["0.weight", "2.weight"],
    "order": [0, 1, 1, 0],
}
OFFLOAD_OPTIMIZER = {"tier": "disk", "window_bytes": 0, "least_bytes": 16, "order": ["0.weight"]}


@pytest.mark.parametrize("change", [_add_a_group, _list_one_twice, _swap_one])
@pytest.mark.parametrize("kinds", [("fuse",), ("parameters",), ("state",), ("fuse", "state")])
def test_what_an_optimizer_updates_may_change_after_planning(change, kinds, tmp_path):
    """A gradient that did not come from backward is not forgotten either."""
    actions = {
        "fuse": {"kind": "fuse_optimizer"},
        "parameters": {"kind": "offload_parameters", "offload_parameters": OFFLOAD_PARAMETERS},
        "state": {"kind": "offload_optimizer", "offload_optimizer": OFFLOAD_OPTIMIZER},
    }
    if "parameters" in kinds and offloaded_parameters_refusal() is not None:
        pytest.skip("this torch offloads no parameters")
    results = []
    for made in (NOTHING, {"actions": [{**actions[kind], "promise": "exact"} for kind in kinds]}):
        model, batch = model_and_batch()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        workload = Workload(model, batch, lambda m, x: m(x).square().mean(), optimizer)
        with Fitted(workload, made, offload_dir=tmp_path) as fitted:
            fitted.step()
            change(model, optimizer)
            for _ in range(2):
                if change is _add_a_group:
                    model.spare.grad = torch.ones(5)
                fitted.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_update_looks_for_its_parameter_alone():
    """A look through all groups at each of them took longer than the updates of a ViT."""
    looks = []

    class Listed(list):
        def __iter__(self):
            looks.append(len(self))
            return super().__iter__()

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(20)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    optimizer.param_groups[0]["params"] = Listed(parameters)
    step = OneByOne(optimizer)
    later = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [later], "lr": 0.25})
    looks.clear()
    for parameter in (*parameters, later):
        parameter.grad = torch.ones(2)
        step.update(parameter)
    assert len(looks) <= 2
    assert all(torch.equal(it.detach(), torch.full((2,), 0.5)) for it in parameters)
    assert torch.equal(later.detach(), torch.full((2,), 0.75))


def test_groups_may_change_within_a_step():
    """A parameter is updated by the settings of the group that lists it by then, or not at all."""
    one, other, gone = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD(
        [{"params": [one], "lr": 0.5}, {"params": [other, gone], "lr": 0.25}], lr=1.0
    )
    step = OneByOne(optimizer)
    optimizer.param_groups.reverse()
    optimizer.param_groups[0]["params"] = [other]
    for parameter in (one, other, gone):
        parameter.grad = torch.ones(2)
        step.update(parameter)
    assert [it[0].item() for it in (one, other, gone)] == [0.5, 0.75, 1.0]
