"""Planning a recorded step: the engine asks, and is answered here.

Responsible for the answers: the trace, its costs, the offer of a place, the step in slices. Not
responsible for what is asked, nor for choosing (both are the engine's,
:class:`memfit._native.PlanSession`), nor for defaults (:mod:`memfit.api`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from memfit import _native
from memfit.answers import Front, Plan, Trace
from memfit.errors import UsageError
from memfit.options import Allowed, Kind
from memfit.plan.alternatives import with_alternatives
from memfit.plan.cost_source import offer, roofline
from memfit.workload import Workload


def meta_of(recorded: Trace) -> dict[str, str]:
    """Where a trace comes from, as the engine has it."""
    meta: dict[str, str] = json.loads(recorded.json())["meta"]
    return meta


@dataclass(frozen=True, slots=True)
class CostSource:
    """Where op times are asked to come from."""

    profile: bool
    file: Path | None
    gpu: str | None

    def __post_init__(self) -> None:
        """Refuse two sources."""
        if self.profile + (self.file is not None) + (self.gpu is not None) > 1:
            raise UsageError("op times have one source: give one of `profile`, `costs` and `gpu`")

    def roofline(self, recorded: Trace) -> str:
        """The engine's cost source, without running the model."""
        device_kind = meta_of(recorded)["device_kind"]
        if self.gpu is not None and device_kind != "cuda":
            raise UsageError(f"`gpu` names a GPU and the step runs on `{device_kind}`")
        return roofline(device_kind, self.file, self.gpu)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which plans are allowed."""

    allow: Allowed
    own_loop: bool
    forbid: tuple[Kind, ...]
    place: str | None

    def limits(self) -> dict[str, Any]:
        """What of it holds for every class, in the words of the engine's requests."""
        return {"own_loop": self.own_loop, "forbid": list(self.forbid)}


def plan_trace(
    recorded: Trace,
    costs: str,
    budget: str | int,
    choice: Choice,
    workload: Workload | None,
    time_limit: float | None = None,
) -> Plan:
    """Plan, and record the step in slices only where a plan may need that."""
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise UsageError(f"`time_limit={time_limit}` is no number of seconds")
    request = {"budget": str(budget), "allow": choice.allow, **choice.limits()}
    planning = _native.PlanSession(json.dumps(request), choice.place)
    while (made := _answered(planning, recorded, costs, workload)) is None:
        planning.search(time_limit)
    return Plan(made)


def front_of_trace(
    recorded: Trace,
    costs: str,
    budget: str | int | None,
    choice: Choice,
    workload: Workload | None,
) -> Front:
    """Plan for many budgets, and for one that is asked for; of every class, whatever is allowed."""
    planning = _native.PlanSession(json.dumps(choice.limits()), choice.place, front=True)
    _answered(planning, recorded, costs, workload)
    return Front(planning.front(None if budget is None else str(budget)))


def _answered(
    planning: _native.PlanSession, recorded: Trace, costs: str, workload: Workload | None
) -> str | None:
    """Answer what planning asks, up to its next search; the plan where there is none any more."""
    while True:
        match planning.next():
            case ("trace",):
                planning.trace(recorded.native)
            case ("costs", _):
                planning.costs(costs)
            case ("offer", device_kind, place, profile):
                known = json.loads(profile) if profile else {}
                planning.offer(json.dumps(offer(device_kind, place, known)))
            case ("slices",):
                native = recorded.native
                planning.slices(with_alternatives(workload, native) if workload else None)
            case ("plan",):
                return None
            case ("nothing", made):
                return made


def place_name(offload: str | PathLike[str] | None) -> str | None:
    """The name of a place to offload to.

    Args:
        offload: A folder, or ``"host"``; ``None`` for nowhere.
    """
    return None if offload is None else fspath(offload)


def offer_of(recorded: Trace, costs: str, place: str | None) -> dict[str, Any] | None:
    """How fast the place for what is offloaded is; ``None`` where there is none."""
    if place is None:
        return None
    return offer(meta_of(recorded)["device_kind"], place, json.loads(costs).get("profile") or {})
