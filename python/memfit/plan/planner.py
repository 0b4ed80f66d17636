"""Planning a recorded step: the engine asks, and is answered here.

Responsible for the answers: the trace, its costs, the offer of a place, the step in other ways. Not
responsible for what is asked, nor for choosing (both are the engine's,
:class:`memfit._native.PlanSession`), nor for defaults (:mod:`memfit.api`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit import _native
from memfit.answers import Front, Plan, Trace
from memfit.errors import UsageError
from memfit.options import Options
from memfit.plan.alternatives import with_alternatives
from memfit.plan.cost_source import offer, roofline
from memfit.workload import Workload


def meta_of(recorded: Trace) -> dict[str, str]:
    """Where a trace comes from, as the engine has it."""
    meta: dict[str, str] = json.loads(recorded.json())["meta"]
    return meta


def op_times_without_run(recorded: Trace, options: Options) -> dict[str, Any]:
    """The engine's cost source, without running the model.

    Raises:
        UsageError: The profile cannot be read, or there is no such GPU.
    """
    device_kind = meta_of(recorded)["device_kind"]
    if options.gpu is not None and device_kind != "cuda":
        raise UsageError(f"`gpu` names a GPU and the step runs on `{device_kind}`")
    return roofline(device_kind, options.costs_file, options.gpu)


def plan_trace(
    recorded: Trace,
    costs: Mapping[str, Any],
    budget: str | int,
    options: Options,
    workload: Workload | None,
) -> Plan:
    """Plan, and record the step in other ways only where a plan may need that."""
    allowed = {"allow": options.promise, "allow_kinds": options.allow_kinds}
    request = {"budget": str(budget), **allowed, **_limits(options)}
    has_time = options.time_limit is None
    planning = _native.PlanSession(request, options.place, tells_leave=has_time)
    step = _Step(recorded.native, costs, workload)
    while (made := _answered(planning, step)) is None:
        planning.search(options.time_limit)
    return Plan.of(made)


def front_of_trace(
    recorded: Trace,
    costs: Mapping[str, Any],
    budget: str | int | None,
    options: Options,
    workload: Workload | None,
) -> Front:
    """Plan for many budgets, and for one that is asked for; of every class, whatever is allowed."""
    planning = _native.PlanSession(_limits(options), options.place, front=True)
    _answered(planning, _Step(recorded.native, costs, workload))
    return Front.of(planning.front(None if budget is None else str(budget)))


def _limits(options: Options) -> dict[str, Any]:
    """What of the options holds for every class, in the words of the engine's requests."""
    return {
        "own_loop": options.own_loop,
        "forbid": list(options.forbid),
        "keep": list(options.keep),
    }


@dataclass(slots=True)
class _Step:
    """What is known of a step.

    Attributes:
        trace: The trace, with all that was recorded since planning began.
        costs: Where its op times come from.
        workload: The step itself; ``None`` where only its trace is there.
    """

    trace: _native.Trace
    costs: Mapping[str, Any]
    workload: Workload | None


def _answered(planning: _native.PlanSession, step: _Step) -> dict[str, Any] | None:
    """Answer what planning asks, up to its next search; the plan where there is none any more."""
    while True:
        needed = planning.next()
        of: Any = needed.get("of")
        match needed["need"]:
            case "trace":
                planning.trace(step.trace)
            case "costs":
                planning.costs(step.costs)
            case "offer":
                planning.offer(offer(of["device_kind"], of["place"], of["profile"] or {}))
            case "ways":
                if step.workload is None:
                    planning.ways(None)
                    continue
                step.trace = with_alternatives(step.workload, step.trace, of)
                planning.ways(step.trace)
            case "plan":
                return None
            case _:
                made: dict[str, Any] = of["plan"]
                return made


def compiled_request(recorded: Trace, costs: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """What a compiled step is planned by, as ``run.compiled.fit.fit_compiled`` takes it."""
    place, profile = options.place, costs.get("profile") or {}
    device_kind = meta_of(recorded)["device_kind"]
    offered = None if place is None else offer(device_kind, place, profile)
    return {**_limits(options), "offload": offered, "profile": profile}
