"""The conversation in which planning asks, as Python has it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit import _native
from memfit.errors import BudgetError, UsageError
from memfit.plan import planner


def words() -> memfit.Workload:
    """A step whose loss is worth slices."""
    model = nn.Linear(16, 2000)
    target = torch.randint(0, 2000, (256,))
    return memfit.Workload(
        model,
        torch.randn(256, 16),
        lambda model, batch: functional.cross_entropy(model(batch), target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def wide() -> memfit.Workload:
    """A step of weights and their optimizer's state, next to no activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return memfit.Workload(
        model,
        torch.randn(8, 256),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def costs(trace: memfit.Trace) -> dict[str, Any]:
    """An op takes a second."""
    ops = json.loads(trace.json())["ops"]
    return {"kind": "profile", "op_seconds": [1.0] * len(ops)}


def test_planning_asks_in_turn_and_says_what_for(tmp_path):
    trace = memfit.trace(words())
    request = {"budget": "110%"}
    planning = _native.PlanSession(request, str(tmp_path))
    assert planning.next() == {"need": "trace"}
    planning.trace(trace.native)
    assert planning.next() == {"need": "costs", "of": {"device_kind": "cpu"}}
    planning.costs(costs(trace))
    of = {"device_kind": "cpu", "place": str(tmp_path), "profile": None}
    assert planning.next() == {"need": "offer", "of": of}
    rates = {"write_bytes_per_second": 1e9, "read_bytes_per_second": 1e9}
    planning.offer({"tier": "disk", "folder": str(tmp_path), **rates})
    assert planning.next() == {"need": "plan"}
    planning.search()
    need = planning.next()
    assert need["need"] == "nothing"
    assert need["of"]["plan"]["verdict"] == "fits"


def test_an_answer_to_another_question_is_refused_and_changes_nothing():
    trace = memfit.trace(words())
    planning = _native.PlanSession({})
    with pytest.raises(UsageError, match="planning needs a trace, and was given costs"):
        planning.costs(costs(trace))
    with pytest.raises(UsageError, match="planning needs a trace, and no search"):
        planning.search()
    assert planning.next() == {"need": "trace"}


def test_a_budget_that_cannot_be_read_is_an_error_of_its_own():
    with pytest.raises(BudgetError, match=r"^cannot read `lots` as a budget: no number; write"):
        _native.PlanSession({"budget": "lots"})
    with pytest.raises(UsageError, match="the plan request is not valid: "):
        _native.PlanSession({"budget": 7})
    with pytest.raises(UsageError, match="the plan request is not valid: unknown variant"):
        _native.PlanSession({"budget": "7", "forbid": ["sleep"]})


@pytest.mark.parametrize(("allow", "budget"), [("equivalent", "100%"), ("exact", "1B")])
def test_the_step_is_recorded_in_slices_once_and_only_with_its_workload(monkeypatch, allow, budget):
    workload = words()
    trace = memfit.trace(workload)
    recorded = []
    with_alternatives = planner.with_alternatives

    def counted(*given):
        recorded.append(with_alternatives(*given))
        return recorded[-1]

    monkeypatch.setattr(planner, "with_alternatives", counted)
    options = memfit.Options(allow=allow, forbid=["autocast", "half_parameters"])
    alone = planner.plan_trace(trace, costs(trace), budget, options, None)
    assert recorded == []
    made = planner.plan_trace(trace, costs(trace), budget, options, workload)
    (sliced,) = recorded
    assert made == planner.plan_trace(memfit.Trace(sliced), costs(trace), budget, options, None)
    assert made.minimum_peak_bytes <= alone.minimum_peak_bytes


def test_where_nothing_fits_a_plan_says_what_leave_to_change_numbers_would_bring():
    exact = {"forbid": ["chunk", "micro_batch"]}
    lowest = memfit.plan(wide(), budget="1B", allow=["optimizer_bits", "shrink"], **exact)
    budget = lowest.minimum_budget_bytes - 1
    made = memfit.plan(wide(), budget=budget, **exact)
    assert not made.fits
    beyond = made.next_class
    assert beyond is not None
    assert beyond.promise == "approximate"
    with_leave = memfit.plan(wide(), budget=budget, allow="approximate", **exact)
    assert with_leave.fits
    assert {"autocast", "half_parameters"} & set(beyond.kinds)
    assert beyond.predicted_peak_bytes <= budget
    with pytest.raises(memfit.DoesNotFit, match="hint: with leave, `allow='approximate'`, a step"):
        memfit.fit(wide(), budget=budget, **exact)
    # Who has so many seconds to plan in wants no more of them spent.
    assert memfit.plan(wide(), budget=budget, time_limit=60, **exact).next_class is None


def test_a_plan_that_fits_records_nothing_in_slices(monkeypatch):
    workload = words()
    trace = memfit.trace(workload)
    monkeypatch.delattr(planner, "with_alternatives")
    assert planner.plan_trace(trace, costs(trace), "110%", memfit.Options(), workload).fits
