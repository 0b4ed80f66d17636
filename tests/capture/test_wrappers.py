"""Tensors of classes that wrap others count as what they wrap: once, and not as if dense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import record
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.workload import Workload
from quantised import Boxed, QuantisedLinear, quantised

WIDTH, ROWS = 256, 64
INT8_BYTES, SCALE_BYTES = WIDTH * WIDTH, WIDTH * 4


def inference(model):
    return Workload(model, torch.randn(ROWS, WIDTH), forward=lambda m, b: m(b))


def adapted(*, boxed=False):
    torch.manual_seed(0)
    layers = [nn.Sequential(QuantisedLinear(WIDTH, boxed=boxed, rank=4), nn.GELU()) for _ in "1234"]
    return Workload(
        nn.Sequential(*layers),
        torch.randn(16 * ROWS, WIDTH),
        lambda m, b: m(b).square().mean(),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
    )


def sizes(trace, category):
    return [a["bytes"] for a in trace["allocations"] if a["category"] == category]


@pytest.mark.parametrize("boxed", [False, True])
def test_a_step_takes_what_is_predicted_measured_and_tracked(boxed):
    model = nn.Sequential(
        QuantisedLinear(WIDTH, boxed=boxed), nn.ReLU(), QuantisedLinear(WIDTH, boxed=boxed)
    )
    workload = inference(model)

    @torch.no_grad()
    def step():
        model(workload.batch)

    step()
    measured = measure_peak(step, static_tensors(workload, None))
    parameters = 2 * (INT8_BYTES + SCALE_BYTES)
    assert measured.static_bytes == parameters + workload.batch.nbytes
    with memfit.track("step") as tracked:
        step()
    inside = tracked["cpu"].peak_bytes - tracked["cpu"].before_bytes
    assert inside == measured.peak_bytes - measured.static_bytes
    assert memfit.predict(workload).predicted_peak_bytes == measured.peak_bytes


def test_what_is_wrapped_is_named_and_counted_once():
    shared = quantised(torch.randn(WIDTH, WIDTH))
    model = nn.ModuleDict({"a": QuantisedLinear(WIDTH), "b": QuantisedLinear(WIDTH)})
    model["a"].weight = nn.Parameter(shared, requires_grad=False)
    model["b"].weight = nn.Parameter(Boxed(shared), requires_grad=False)
    workload = Workload(model, torch.randn(ROWS, WIDTH), forward=lambda m, b: m["a"](m["b"](b)))
    assert measure_peak(list, static_tensors(workload, None)).static_bytes == (
        INT8_BYTES + SCALE_BYTES + workload.batch.nbytes
    )
    trace = record(inference(QuantisedLinear(WIDTH)), probe=False)
    names = [trace["strings"][a["name"]] for a in trace["allocations"][:2]]
    assert names == ["weight.values", "weight.scales"]
    assert sizes(trace, "parameter") == [INT8_BYTES, SCALE_BYTES]


def test_the_ops_that_its_class_runs_are_recorded():
    trace = record(inference(QuantisedLinear(WIDTH)), probe=False)
    assert WIDTH * WIDTH * 4 in sizes(trace, "temporary"), "the dense weight, for a moment"


def test_it_is_tracked_as_a_parameter():
    model = QuantisedLinear(WIDTH)
    with memfit.track("quantised parameters") as tracked:
        del model
    (cpu,) = tracked.as_dict()["devices"]
    before, after = (c["parameter"] for c in (cpu["before_by_category"], cpu["after_by_category"]))
    assert before - after == INT8_BYTES + SCALE_BYTES


@pytest.mark.parametrize("boxed", [False, True])
def test_training_beside_it_is_predicted_and_planned_exactly(boxed):
    workload = adapted(boxed=boxed)
    found = memfit.verify(workload, "70%", steps=2)
    assert found.holds
    assert found.gradients.agreement == "bitwise"
    with Fitted(adapted(boxed=boxed), memfit.plan(workload, "70%")) as fitted:
        fitted.step()
        assert not fitted.report().divergence


def test_for_a_gpu_it_is_what_it_wraps():
    trace = record(inference(QuantisedLinear(WIDTH, boxed=True)), device="cuda", probe=False)
    assert sizes(trace, "parameter") == [INT8_BYTES, SCALE_BYTES]


def test_a_trained_one_is_updated_with_the_others():
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(Boxed(model.weight.detach()))
    workload = Workload(
        nn.Sequential(model, nn.Linear(WIDTH, WIDTH)),
        torch.randn(ROWS, WIDTH),
        lambda m, b: m(b).square().mean(),
        lambda p: torch.optim.SGD(p, lr=1e-3),
    )
    trace = record(workload, probe=False)
    assert sorted(sizes(trace, "gradient")) == sorted(p.nbytes for p in workload.model.parameters())
    assert "`Boxed`, which wraps other tensors" in trace["meta"]["per_parameter_refusal"]
    assert "`Boxed`, which wraps other tensors" in trace["meta"]["fused_optimizer_refusal"]
