"""Forward under autocast as an action: bits, bytes, and when it is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rates import costs_file
from torch import nn
from torch.nn import functional

import memfit
from memfit.apply.precision.autocast import UnderAutocast
from memfit.measure import measure_peak, static_tensors
from memfit.plan.alternatives import with_alternatives
from memfit.workload import Workload

ALONE = ("chunk", "micro_batch")
"""What tests here forbid in addition: they ask for autocast."""


class Classifier(nn.Module):
    """Linear layers with norms and dropout; the middle one is called ``uses`` times."""

    def __init__(self, width=256, uses=1):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.middle = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 50)
        self.uses = uses

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(self.uses):
            x = x + self.drop(self.middle(x))
        return self.head(x)


def workload(rows=512, optimizer=torch.optim.AdamW, **form):
    torch.manual_seed(0)
    batch = (torch.randn(rows, 64), torch.randint(0, 50, (rows,)))
    return Workload(
        Classifier(**form),
        batch,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer,
    )


def action(plan):
    found = [it for it in plan.as_dict()["actions"] if it["kind"] == "autocast"]
    return found[0]["autocast"] if found else None


def run(load, plan, steps=3):
    """Losses of some steps, and the parameters after them."""
    with memfit.Fitted(load, plan) as fitted:
        torch.manual_seed(3)
        losses = [fitted.step().clone() for _ in range(steps)]
    return losses, [p.detach().clone() for p in load.model.parameters()]


@pytest.fixture
def quick(tmp_path):
    """Op times of a machine where 16 bits pay: on some processors recomputing costs less."""
    return costs_file(tmp_path, bfloat16=4e9, float16=4e9)


def planned(load, budget, **options):
    options.setdefault("forbid", ALONE)
    return memfit.plan(load, budget, allow="autocast", **options)


@pytest.mark.parametrize("uses", [1, 4])
@pytest.mark.parametrize("budget", ["85%", "70%"])
def test_a_plan_is_to_the_bit_the_users_own_autocast_and_to_the_byte_as_predicted(
    uses, budget, quick
):
    plan = planned(workload(uses=uses), budget, costs=quick)
    said = action(plan)
    assert plan.promise == "approximate"
    assert said is not None
    assert said["dtype"] == "bfloat16"
    own = replace(workload(uses=uses), autocast=torch.bfloat16, autocast_cache=said["cache"])
    losses, parameters = run(workload(uses=uses), plan)
    expected, theirs = run(own, {"actions": []})
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters, theirs, strict=True))
    plain, _ = run(workload(uses=uses), {"actions": []})
    assert not torch.equal(plain[0], losses[0])

    load = workload(uses=uses)
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
    assert peak == pytest.approx(plan.planned.predicted_peak_bytes, rel=1e-3)
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("cache", [True, False])
def test_a_step_that_autocasts_by_itself_is_predicted_with_its_cache(cache):
    load = replace(workload(), autocast=torch.bfloat16, autocast_cache=cache)
    predicted = memfit.predict(load).predicted_peak_bytes
    fitted = memfit.Fitted(load, {"actions": []})
    fitted.step()
    peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
    assert peak == pytest.approx(predicted, rel=1e-3)


class Kept(nn.Module):
    """A module that computes in its own type, as a person would write it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.module(x.float())


def test_modules_that_are_kept_compute_in_their_own_type(quick):
    plan = planned(workload(uses=2), "90%", keep=["middle.1", "head"], costs=quick)
    assert action(plan)["keep"] == ["middle.1", "head"]
    assert any("`middle.1` and 1 more stay as they are" in note for note in plan.notes)
    losses, parameters = run(workload(uses=2), plan)

    own = replace(workload(uses=2), autocast=torch.bfloat16, autocast_cache=action(plan)["cache"])
    own.model.middle[1], own.model.head = Kept(own.model.middle[1]), Kept(own.model.head)
    expected, theirs = run(own, {"actions": []})
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters, theirs, strict=True))

    load = workload(uses=2)
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
    assert peak == pytest.approx(plan.planned.predicted_peak_bytes, rel=1e-3)
    assert not load.model.head._forward_pre_hooks
    assert not load.model.head._forward_hooks


def test_weights_of_modules_that_are_kept_stay_as_they_are():
    plan = memfit.plan(workload(), "4KiB", allow="half_parameters", keep=["middle"], forbid=ALONE)
    half = next(it for it in plan.as_dict()["actions"] if it["kind"] == "half_parameters")
    assert half["half_parameters"]["names"] == ["first.weight", "head.weight"]


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(memfit.UsageError, match=r"no module `midle` to keep\s+.*`middle`"):
        planned(workload(), "70%", keep=["midle"])
    with pytest.raises(memfit.UsageError, match=r"write `keep=\['head'\]`"):
        planned(workload(), "70%", keep="head")


def test_a_failure_inside_a_module_that_is_kept_leaves_nothing_behind():
    plan = planned(workload(), "80%", keep=["head"])
    load = workload()
    load.model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with memfit.Fitted(load, plan) as fitted, pytest.raises(ZeroDivisionError):
        fitted.step()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    assert len(load.model.head._forward_pre_hooks) == 1


def least(load, **options):
    return memfit.plan(load, "4KiB", **options).minimum_peak_bytes


def test_few_rows_and_large_weights_are_run_without_the_weight_cache():
    """With the cache each weight has a second copy that no recomputation can touch."""
    load = workload(rows=16, width=512, uses=1, optimizer=torch.optim.SGD)
    with_leave = least(load, allow="autocast", forbid=ALONE)
    assert with_leave <= least(load, forbid=ALONE)
    trace = memfit.trace(load).native
    ways = [{"autocast": {"dtype": "bfloat16", "cache": cache}} for cache in (False, True)]
    both = memfit.Trace(with_alternatives(load, trace, ways))
    cached = memfit.Trace(with_alternatives(load, trace, ways[1:]))
    cast = {"allow": "autocast", "forbid": (*ALONE, "remat", "fuse_optimizer")}
    assert least(both, **cast) <= least(cached, **cast)


@pytest.mark.parametrize(("uses", "caches"), [(1, [False]), (3, [False, True])])
def test_the_weight_cache_is_tried_where_a_weight_is_cast_more_than_once(uses, caches):
    load = workload(rows=64, uses=uses)
    ways = [{"autocast": {"dtype": "bfloat16", "cache": cache}} for cache in (False, True)]
    found = with_alternatives(load, memfit.trace(load).native, ways)
    steps = json.loads(found.json())["alternatives"]["steps"]
    assert [step["autocast"]["cache"] for step in steps] == caches


def test_a_budget_that_the_plain_step_keeps_needs_no_autocast():
    assert planned(workload(), "2GiB").actions == ()


def test_in_the_users_own_loop_forward_runs_under_autocast():
    planned_load = workload()
    plan = planned(planned_load, "80%", own_loop=True)
    assert action(plan) is not None
    own = workload()
    seen = []
    for load, fitted in ((planned_load, memfit.Fitted(planned_load, plan)), (own, None)):
        optimizer = load.optimizer(load.model.parameters())
        torch.manual_seed(3)
        cache = action(plan)["cache"]
        around = (
            fitted.forward()
            if fitted is not None
            else torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)
        )
        with around:
            loss = load.loss(load.model, load.batch)
        loss.backward()
        optimizer.step()
        seen.append([loss.detach(), *(p.detach() for p in load.model.parameters())])
        assert not torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_block_of_the_callers_own_is_left_alone_and_ends_when_it_ends():
    """A script's block around its model ends before the pass does, whose end restores a state."""
    part = UnderAutocast(Classifier(), {"dtype": "bfloat16", "cache": False})
    own = torch.autocast("cpu", torch.float16)
    own.__enter__()
    around = part.forward()
    around.__enter__()
    assert torch.get_autocast_dtype("cpu") is torch.float16
    own.__exit__(None, None, None)
    around.__exit__(None, None, None)
    assert not torch.is_autocast_enabled("cpu")
    assert part.divergence == "the forward autocasts by itself"
    with part.forward():
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not part.diverged


def test_the_smallest_slices_run_under_autocast_too():
    torch.manual_seed(0)

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4000, 32), nn.Linear(32, 32), nn.Linear(32, 4000))
        ids = torch.randint(0, 4000, (4, 64))
        return Workload(
            model,
            ids,
            lambda m, b: functional.cross_entropy(m(b).flatten(0, 1), b.flatten()),
            torch.optim.SGD,
        )

    whole = least(make(), allow=["equivalent", "autocast"], forbid=("micro_batch", "chunk"))
    plan = memfit.plan(
        make(), whole * 7 // 10, allow=["equivalent", "autocast"], forbid=("micro_batch",)
    )
    kinds = {it.kind for it in plan.actions}
    assert "chunk" in kinds
    load = make()
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("kind", ["autocast", "autocast_fp16"])
def test_pieces_of_the_batch_run_under_autocast_too(kind, quick):
    others = ("remat", "chunk", "unneeded_saves", "fuse_optimizer", "one_by_one")
    # Of fewer rows, oneDNN packs other parts where the processor multiplies bfloat16 in tiles.
    load = workload(rows=8192, optimizer=torch.optim.SGD)
    plan = memfit.plan(load, "55%", allow=["equivalent", kind], forbid=others, costs=quick)
    assert plan.fits
    assert {it.kind for it in plan.actions} == {kind, "micro_batch"}
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
        assert fitted.report().divergence == ""
    assert peak == pytest.approx(plan.planned.predicted_peak_bytes, rel=1e-3)
    assert peak <= plan.budget_bytes


def test_leave_never_makes_a_plan_slower_nor_its_least_peak_higher():
    load = workload(rows=1024)
    trace = memfit.trace(load).native
    ways = [{"autocast": {"dtype": "bfloat16", "cache": False}}]
    recorded = memfit.Trace(with_alternatives(load, trace, [*trace.ways(), *ways]))
    for percent in (92, 76, 60, 44, 28):
        without = memfit.plan(recorded, f"{percent}%", allow="equivalent")
        allowed = memfit.plan(recorded, f"{percent}%", allow="approximate")
        assert allowed.minimum_peak_bytes <= without.minimum_peak_bytes
        assert allowed.fits >= without.fits
        if without.fits:
            assert allowed.predicted_step_ratio <= without.predicted_step_ratio * (1 + 1e-9)


def refusal(load, **options):
    plan = memfit.plan(load, "90%", allow="autocast", **options)
    return next((it.reason for it in plan.refusals if it.kind == "autocast"), None)


def test_what_autocasts_already_is_left_alone_and_so_is_what_has_nothing_to_cast():
    own = replace(workload(), autocast=torch.bfloat16)
    assert refusal(own) == "the step computes in bfloat16 as it is"

    torch.manual_seed(0)
    pointwise = nn.Sequential(nn.LayerNorm(64), nn.Tanh(), nn.LayerNorm(64), nn.Tanh())
    load = Workload(
        pointwise, torch.randn(512, 64), lambda m, b: m(b).square().mean(), torch.optim.SGD
    )
    assert refusal(load) == "no matrix product or convolution computes in float32"
    assert refusal(workload(), forbid=("autocast",)) == "forbidden by the request"
    assert refusal(workload()) is None


def test_a_plan_that_says_nothing_of_types_is_refused():
    broken = {"actions": [{"kind": "autocast", "autocast": {"dtype": "int8", "cache": True}}]}
    with pytest.raises(memfit.UsageError, match="malformed"):
        memfit.Fitted(workload(), broken)
