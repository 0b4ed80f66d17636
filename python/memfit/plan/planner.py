"""Planning a recorded step: the trace, its costs and what was asked, handed to the engine.

Responsible for asking for the step in slices where a plan may need it, and for how fast the place
is that things may be offloaded to. Not responsible for defaults (:mod:`memfit.api`) nor for
choosing: that is the engine's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from memfit import _native
from memfit.answers import Plan, Trace
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
    request = {
        "budget": str(budget),
        "allow": choice.allow,
        "own_loop": choice.own_loop,
        "forbid": list(choice.forbid),
        "offload": offer_of(recorded, costs, choice.place),
    }
    recorded = in_slices(recorded, workload, request)
    made = _native.plan(recorded.native, costs, json.dumps(request), time_limit)
    wider = in_slices(recorded, workload, request, made)
    if wider is not recorded:
        made = _native.plan(wider.native, costs, json.dumps(request), time_limit)
    return Plan(made)


def in_slices(
    recorded: Trace, workload: Workload | None, request: dict[str, Any], made: str | None = None
) -> Trace:
    """The trace with the step in slices, where that may make for a better plan."""
    if workload is None or not recorded.native.wants_alternatives(json.dumps(request), made):
        return recorded
    return Trace(with_alternatives(workload, recorded.native))


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
