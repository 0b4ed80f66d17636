"""memfit itself: captured and profiled once per model, planned and applied per point.

Responsible for preparing a model (trace and op times, kept in the work folder so that all plans
of a run are made from the same figures) and for a step that runs by a plan for one budget.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.planners.compiled import draw_as, unbudgeted
from benchmarks.planners.models import make_optimizer
from benchmarks.planners.way import CannotRunError, Way, ordinary_step

import memfit
from memfit import _native
from memfit.errors import NotCompiledWarning
from memfit.measure.step_time import cpu_seconds
from memfit.plan.alternatives import with_alternatives
from memfit.run.compiled.fitted import CompiledFitted
from memfit.run.fitted import Fitted
from memfit.run.profile import profiled

MINIMUM_ATTEMPTS = 4
"""Budgets tried for the least compiled peak: each refusal names the next."""

STEPS_AFTER_PROFILE = 5
"""Ordinary steps that a profile is held against."""

LEAST_SECONDS = 30.0
"""How long the lowest peak is looked for, as with ``memfit plan --time-limit 30``."""


def prepare(workload: memfit.Workload, folder: Path, stem: str) -> dict[str, Any]:
    """Capture the step, also in slices, and time its ops; both are kept for the points.

    Args:
        workload: The workload.
        folder: Where to keep them.
        stem: Name of the files.

    Returns:
        Seconds of either; of a step as predicted from the times and as measured right afterwards.
    """
    capture_seconds, trace = _timed(lambda: _captured(workload))
    profiled(workload, trace.native)  # the process's memory settles in its first steps
    profile_seconds, op_times = _timed(lambda: profiled(workload, trace.native))
    trace.save(folder / f"{stem}.memfit")
    (folder / f"{stem}.costs.json").write_text(json.dumps(op_times))
    make_optimizer(workload)
    step = ordinary_step(workload)
    step()
    profiled_step_seconds = statistics.median(cpu_seconds(step) for _ in range(STEPS_AFTER_PROFILE))
    unbounded = {"budget": "1000000GiB"}
    plan = _native.plan(trace.native, op_times, unbounded, None)
    return {
        "capture_seconds": capture_seconds,
        "profile_seconds": profile_seconds,
        "predicted_seconds": plan["unplanned"]["predicted_step_seconds"],
        "profiled_step_seconds": profiled_step_seconds,
        "ops": len(json.loads(trace.json())["ops"]),
    }


def _captured(workload: memfit.Workload) -> memfit.Trace:
    native = memfit.trace(workload).native
    return memfit.Trace(with_alternatives(workload, native, native.ways()))


def planned(
    workload: memfit.Workload,
    prepared: Path,
    *,
    budget: str,
    allow: str,
    forbid: list[str],
) -> Way:
    """A step by memfit's plan.

    Args:
        workload: The workload; its optimizer exists already.
        prepared: Where :func:`prepare` kept trace and op times, less the ends of their names.
        budget: As ``memfit.plan`` takes it, or ``minimum``.
        allow: The loosest class of action.
        forbid: Kinds of action to leave out.

    Returns:
        The way.

    Raises:
        CannotRunError: No plan fits.
    """
    trace = memfit.Trace.decode(prepared.with_suffix(".memfit").read_bytes())
    op_times = json.loads(prepared.with_suffix(".costs.json").read_text())
    seconds = LEAST_SECONDS if budget == "minimum" else None

    def ask(budget: str) -> tuple[float, dict[str, Any]]:
        request = {"allow": allow, "own_loop": False, "forbid": forbid, "budget": budget}
        return _timed(lambda: _native.plan(trace.native, op_times, request, seconds))

    if budget == "minimum":
        _, least = ask("1%")
        budget = str(least["minimum_peak_bytes"] + least["margin_bytes"])
    plan_seconds, plan = ask(budget)
    if plan["verdict"] != "fits":
        least_peak = plan["minimum_peak_bytes"]
        raise CannotRunError(f"no plan fits {plan['budget_bytes']} bytes: least peak {least_peak}")
    reduction = json.loads(trace.json())["meta"]["loss_reduction"]
    fitted = Fitted(workload, plan, loss_reduction=reduction)
    return Way(
        fitted.step,
        predicted_peak_bytes=plan["planned"]["predicted_peak_bytes"],
        predicted_seconds=plan["planned"]["predicted_step_seconds"],
        notes={
            "plan_seconds": plan_seconds,
            "budget_bytes": plan["budget_bytes"],
            "predicted_eager_seconds": plan["unplanned"]["predicted_step_seconds"],
            "predicted_step_ratio": plan["predicted_step_ratio"],
            "lower_bound_ratio": plan["lower_bound_ratio"],
            "promise": plan.get("promise"),
            "actions": [
                {"kind": action["kind"], "count": action.get("count")} for action in plan["actions"]
            ],
        },
    )


def compiled(
    workload: memfit.Workload, *, budget: str, reference: str, allow: str, forbid: list[str]
) -> Way:
    """A compiled step inside a budget.

    Args:
        workload: The workload; its optimizer exists already.
        budget: As ``memfit.fit`` takes it, or ``minimum``.
        reference: As in :func:`benchmarks.planners.compiled.budgeted`.
        allow: The loosest class of the eager plan, which is made as well.
        forbid: Kinds of action to leave out of it.

    Returns:
        The way.

    Raises:
        CannotRunError: No compiled step keeps to the budget.
    """
    draw_as(reference)
    is_minimum = budget == "minimum"
    asked = "1" if is_minimum else budget
    for _ in range(MINIMUM_ATTEMPTS):
        found, reason = _fit_compiled(workload, asked, allow, forbid, settled=is_minimum)
        if found is not None or not is_minimum:
            break
        # The reason names the bytes that it takes at least.
        least = re.search(r"takes (\d+) bytes", reason)
        if least is None:
            break
        asked = least[1]
    if found is None:
        raise CannotRunError(reason)
    fitted, seconds = found

    way = Way(
        fitted.step,
        reference=unbudgeted(workload) if reference == "compiled" else None,
        notes={"plan_seconds": seconds},
    )

    def settle() -> None:
        """Until memfit cuts the graphs no further; what it says of them is said of the last."""
        while not fitted.has_settled:
            fitted.step()
        if fitted.report().not_compiled:
            raise CannotRunError(fitted.report().not_compiled)
        plan = fitted.plan
        way.predicted_peak_bytes = plan.planned.predicted_peak_bytes
        way.notes = {
            **way.notes,
            "budget_bytes": plan.budget_bytes,
            "corrections": fitted.report().corrections,
            "loosened": fitted.report().loosened,
            "actions": [{"kind": a.kind, "count": a.count} for a in plan.actions],
        }

    way.settle = settle
    return way


def _fit_compiled(
    workload: memfit.Workload, budget: str, allow: str, forbid: list[str], *, settled: bool
) -> tuple[tuple[Any, float] | None, str]:
    """The fitted workload and the seconds it took, or why the step is not compiled.

    What memfit says before the run that a step takes at least may be too little; with ``settled``
    steps run until it was measured.
    """
    choice: dict[str, Any] = {"allow": allow, "forbid": forbid}
    with warnings.catch_warnings(action="ignore", category=NotCompiledWarning):
        try:
            seconds, fitted = _timed(lambda: memfit.fit(workload, budget, compile=True, **choice))
        except memfit.DoesNotFit as error:
            return None, str(error)
        while settled and isinstance(fitted, CompiledFitted) and not fitted.has_settled:
            fitted.step()
    reason = fitted.report().not_compiled
    return (None, reason) if reason else ((fitted, seconds), "")


def _timed(call: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result
