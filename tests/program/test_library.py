"""The public Python functions: the same answers as the program."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import workloads

import memfit


@pytest.fixture(scope="module")
def trace() -> memfit.Trace:
    """A trace of the MLP."""
    return memfit.trace(workloads.mlp(), target="mlp")


def test_public_names_are_there():
    for name in memfit.__all__:
        assert getattr(memfit, name) is not None
    assert callable(memfit.trace)
    with pytest.raises(AttributeError, match="nonsense"):
        memfit.nonsense  # noqa: B018 - the access is what is tested


def test_a_prediction_has_the_fields_of_the_engine(trace: memfit.Trace):
    prediction = memfit.predict(trace, budget="1GiB")
    assert prediction.predicted_peak_bytes > 0
    assert prediction.breakdown.category[0].bytes > 0
    assert prediction.as_dict()["batch"] == prediction.batch == 512
    assert str(prediction).startswith("mlp")
    assert prediction == memfit.predict(trace, budget="1GiB")
    with pytest.raises(AttributeError, match="peek"):
        _ = prediction.peek


def test_a_gpu_takes_the_place_of_a_budget(trace: memfit.Trace):
    found = memfit.predict(workloads.mlp(), gpu="rtx4090")
    assert found.device_kind == "cuda"
    assert found.gpu is not None
    assert found.gpu.fits
    assert found.largest_batch is not None
    assert "FITS on RTX 4090: " in str(found)
    for wrong, words in (
        ({"gpu": "mi300x"}, "mi300x"),
        ({"gpu": "t4", "budget": "1GiB"}, "not both"),
    ):
        with pytest.raises(memfit.UsageError, match=words):
            memfit.predict(trace, **wrong)  # type: ignore[arg-type]


def test_a_trace_and_a_plan_survive_their_files(trace: memfit.Trace, tmp_path: Path):
    trace.save(tmp_path / "step.memfit")
    again = memfit.load(tmp_path / "step.memfit")
    assert isinstance(again, memfit.Trace)
    assert again.json() == trace.json()
    plan = memfit.plan(again, budget="90%")
    plan.save(tmp_path / "plan.memfit")
    loaded = memfit.load(tmp_path / "plan.memfit")
    assert isinstance(loaded, memfit.Plan)
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.memfit", "step.memfit"]


def test_every_point_of_a_front_is_a_plan(trace: memfit.Trace, tmp_path: Path):
    front = memfit.pareto(trace, budget="80%")
    assert front == memfit.pareto(trace, budget="80%")
    assert str(front).startswith("mlp")
    assert front.points
    for point in front.points:
        plan = memfit.plan(trace, point.budget_bytes, allow=point.allow)
        assert plan.planned.predicted_peak_bytes == point.predicted_peak_bytes
        assert plan.predicted_step_ratio == point.predicted_step_ratio
    front.save(tmp_path / "front.html")
    assert (tmp_path / "front.html").read_text().startswith("<!DOCTYPE html>")
    front.save(tmp_path / "front.svg")
    assert "<svg" in (tmp_path / "front.svg").read_text()
    with pytest.raises(memfit.UsageError, match=r"front\.png"):
        front.save(tmp_path / "front.png")
    with pytest.raises(memfit.BudgetError, match="lots"):
        memfit.pareto(trace, budget="lots")


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(memfit.UsageError, match="cannot read"):
        memfit.load(tmp_path / "absent.memfit")
    (tmp_path / "bad.memfit").write_bytes(b"hello")
    with pytest.raises(memfit.TraceFileError, match=r"bad\.memfit"):
        memfit.load(tmp_path / "bad.memfit")


def test_budgets_that_cannot_be_read(trace: memfit.Trace):
    with pytest.raises(memfit.BudgetError, match="lots"):
        memfit.plan(trace, budget="lots")
    with pytest.raises(memfit.UsageError, match="Workload"):
        memfit.predict(3)  # type: ignore[arg-type]
    with pytest.raises(memfit.UsageError, match="profile"):
        memfit.plan(trace, budget="90%", profile=True)


def test_fit_runs_steps_inside_the_budget():
    workload = workloads.transformer()
    state = torch.get_rng_state()
    before = {name: p.detach().clone() for name, p in workload.model.named_parameters()}
    fitted = memfit.fit(workload, budget="85%", forbid=["micro_batch"])
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in workload.model.named_parameters():
        assert torch.equal(before[name], parameter)
    first = fitted.step(workload.batch)
    second = fitted.step(workload.batch)
    assert second < first


def test_fit_refuses_with_the_smallest_peak():
    with pytest.raises(memfit.DoesNotFit) as caught:
        memfit.fit(workloads.mlp(), budget="10KiB")
    assert caught.value.minimum_peak_bytes > 10 << 10
    assert not caught.value.plan.fits


@pytest.mark.parametrize("build", [workloads.mlp, workloads.transformer])
def test_the_smallest_budget_that_a_refusal_names_is_enough(build: Callable[[], memfit.Workload]):
    with pytest.raises(memfit.DoesNotFit) as caught:
        memfit.fit(build(), budget="10KiB")
    budget = caught.value.minimum_budget_bytes
    assert f"({budget} bytes)" in str(caught.value)
    fitted = memfit.fit(build(), budget=budget)
    assert fitted.plan.planned.predicted_peak_bytes <= budget


def test_a_saved_plan_is_run(tmp_path):
    torch.manual_seed(1)
    workload = workloads.mlp()
    made = memfit.plan(workload, budget="90%")
    assert made.actions
    made.save(tmp_path / "plan.memfit")
    loaded = memfit.load(tmp_path / "plan.memfit")
    assert isinstance(loaded, memfit.Plan)
    fitted = memfit.fit(workload, plan=loaded)
    assert fitted.plan is loaded
    assert loaded == made
    loss = fitted.step(workload.batch)
    torch.manual_seed(1)
    other = workloads.mlp()
    assert torch.equal(memfit.Fitted(other, loaded).step(other.batch), loss)
    for arguments in ({"budget": "90%"}, {"compile": True}):
        with pytest.raises(memfit.UsageError, match="budget of its own"):
            memfit.fit(workload, plan=loaded, **arguments)
