"""What of a step is no matter of its graphs: what is static, and the optimizer.

Responsible for reading both off the eager trace, with the optimizer's state in memory or elsewhere.
Not responsible for graphs.

Compiled graphs end before the optimizer begins, so state that is elsewhere between updates is not
there while they run. How updates one by one then proceed, and what they take, is the engine's
answer: it plans the step with nothing in it that is gone when the optimizer begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from memfit import _native
from memfit.run.compiled.inductor.rates import NOMINAL
from memfit.schema import Kind

STATE_AWAY = "offload_optimizer"
"""The kind of action that keeps the optimizer's state elsewhere."""

_OTHER_KINDS = tuple(kind for kind in get_args(Kind) if kind != STATE_AWAY)

_STATIC = frozenset({"parameter", "module_buffer", "optimizer_state", "input"})


@dataclass(slots=True, frozen=True)
class BesideGraphs:
    """What a step takes besides its graphs.

    Attributes:
        static_bytes: What is there all along: parameters, module buffers, optimizer state, batch.
        optimizer_peak_bytes: Most bytes while the optimizer runs.
        actions: Actions of the engine's plans that make it so.
    """

    static_bytes: int
    optimizer_peak_bytes: int
    actions: Sequence[Mapping[str, Any]] = ()


def beside_graphs(trace: Mapping[str, Any]) -> BesideGraphs:
    """What a step takes besides its graphs, with the optimizer's state in memory.

    Args:
        trace: The trace as parsed JSON.
    """
    return BesideGraphs(_static_bytes(trace), _optimizer_peak_bytes(trace))


def with_state_away(
    trace: Mapping[str, Any], budget_bytes: int, request: Mapping[str, Any]
) -> BesideGraphs | None:
    """The same with the optimizer's state elsewhere.

    Args:
        trace: The trace as parsed JSON.
        budget_bytes: Most bytes of the step.
        request: What the user asks for, in the words of the engine's requests.

    Returns:
        ``None`` where that is not possible, or leaves the optimizer's step above the budget.
    """
    forbidden = request.get("forbid", ())
    if request.get("offload") is None or STATE_AWAY in forbidden:
        return None
    at_home = beside_graphs(trace)
    asked = {
        "budget": str(min(budget_bytes, at_home.optimizer_peak_bytes - 1)),
        "forbid": _OTHER_KINDS,
        "offload": request["offload"],
    }
    reduced = json.dumps(_optimizer_alone(trace)).encode()
    native = _native.Trace.from_json(reduced, None, 0)
    plan = _native.plan(native, NOMINAL.cost_source(), asked)
    action = next((a for a in plan["actions"] if a["kind"] == STATE_AWAY), None)
    if plan["verdict"] != "fits" or action is None:
        return None
    away = _away_bytes(trace, action[STATE_AWAY]["least_bytes"])
    peak = int(plan["planned"]["predicted_peak_bytes"])
    return BesideGraphs(at_home.static_bytes - away, peak, (action,))


def _optimizer_alone(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The trace without the bytes of what is gone when the optimizer begins."""
    start = _optimizer_start(trace)
    allocations = [
        a
        if a["category"] in _STATIC or any(end > start for _, end in a["natural"])
        else {**a, "bytes": 0, "law": None}
        for a in trace["allocations"]
    ]
    ops = [
        op if index >= start else {**op, "workspace_bytes": 0}
        for index, op in enumerate(trace["ops"])
    ]
    return {**trace, "allocations": allocations, "ops": ops}


def _away_bytes(trace: Mapping[str, Any], least_bytes: int) -> int:
    """Bytes of state that belongs to one parameter and goes."""
    states = {index for update in trace["updates"] for index in update["state"]}
    known = [trace["allocations"][index] for index in states]
    sizes = [a["bytes"] for a in known if a["category"] == "optimizer_state"]
    return sum(size for size in sizes if size >= max(least_bytes, 1))


def _optimizer_start(trace: Mapping[str, Any]) -> int:
    ops = trace["ops"]
    return next((i for i, op in enumerate(ops) if op["phase"] == "optimizer"), len(ops))


def _static_bytes(trace: Mapping[str, Any]) -> int:
    """Parameters, module buffers, optimizer state and batch."""
    return sum(a["bytes"] for a in trace["allocations"] if a["category"] in _STATIC)


def _optimizer_peak_bytes(trace: Mapping[str, Any]) -> int:
    """Most bytes alive while the optimizer runs; 0 without one."""
    ops, start = trace["ops"], _optimizer_start(trace)
    change = [0] * (len(ops) + 2)
    for allocation in trace["allocations"]:
        for first, end in allocation["natural"]:
            if end > start:
                change[max(first, start)] += allocation["bytes"]
                change[end] -= allocation["bytes"]
    alive = peak = 0
    for index in range(start, len(ops)):
        alive += change[index]
        peak = max(peak, alive + ops[index]["workspace_bytes"])
    return peak
