"""From a workload and a budget to a compiled step, or to the reason why not.

Responsible for the order of questions: is the step one that compiles, which graphs has it, does a
division of the budget fit. Not responsible for the answers (the other files of this package), nor
for the eager plan that is used instead (:mod:`memfit.api.fit`). Whether Inductor can compile here
was asked before (:mod:`memfit.run.compiled.toolchain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from memfit import answers
from memfit._native import bytes_text
from memfit.records import read
from memfit.run.compiled.budget_shares import Share, divide
from memfit.run.compiled.fitted import CompiledFitted, CompiledPlan
from memfit.run.compiled.inductor.rates import Place
from memfit.run.compiled.outside_graphs import BesideGraphs, beside_graphs, with_state_away
from memfit.run.compiled.partitioner import Partitioner
from memfit.run.compiled.recording import Recorded, record
from memfit.run.compiled.search import Chosen
from memfit.run.fitted import Fitted
from memfit.schema import CompiledAction, CompiledGraph, Kind
from memfit.track import cpu
from memfit.workload import Workload


@dataclass(slots=True, frozen=True)
class NotCompiled:
    """Why a step is not run compiled.

    Attributes:
        reason: A clause without its full stop.
        least_bytes: What the graphs take at least, where that is why.
    """

    reason: str
    least_bytes: int = 0


def fit_compiled(
    workload: Workload,
    trace: Mapping[str, Any],
    budget_bytes: int,
    request: Mapping[str, Any],
    eager: Callable[[Optimizer | None], Fitted] | None = None,
) -> CompiledFitted | NotCompiled:
    """Plan a step for ``torch.compile`` and apply the plan.

    Args:
        workload: The step.
        trace: Its eager trace as parsed JSON.
        budget_bytes: Most bytes of the step.
        request: What the user asks for, in the words of the engine's requests; ``profile`` is what
            the device can do, where that is known.
        eager: See :class:`CompiledFitted`.

    Returns:
        The fitted workload, or why it cannot run compiled under that budget.
    """
    reason = _refusal(workload, request)
    if reason is not None:
        return NotCompiled(reason)
    at_home = beside_graphs(trace)
    if at_home.optimizer_peak_bytes > budget_bytes and not with_state_away(
        trace, budget_bytes, request
    ):
        return NotCompiled(
            f"the optimizer step takes {bytes_text(at_home.optimizer_peak_bytes)}, and compiled "
            "code returns all gradients at once"
        )
    graphs = _graphs(workload)
    if isinstance(graphs, NotCompiled):
        return graphs

    fused = trace["meta"]["device_kind"] == "cpu" and cpu.start() is None
    offer, profile = _offer(request), request.get("profile", {})
    place = None if offer is None else Place.of(offer, profile)
    plan_for = partial(_plan, graphs, fused=fused, offer=offer, place=place)

    def plan(beyond_bytes: int) -> CompiledPlan | NotCompiled:
        made = plan_for(at_home, budget_bytes, beyond_bytes)
        if isinstance(made, CompiledPlan):
            return made
        elsewhere = with_state_away(trace, budget_bytes - max(beyond_bytes, 0), request)
        if elsewhere is None:
            return made
        return plan_for(elsewhere, budget_bytes, beyond_bytes)

    def replan(beyond_bytes: int) -> CompiledPlan | None:
        made = plan(beyond_bytes)
        if isinstance(made, NotCompiled):
            # What was measured is of another partition: that of least peak may keep the budget yet.
            spare_bytes = budget_bytes - (made.least_bytes - beyond_bytes)
            if made.least_bytes and spare_bytes >= 0:
                made = plan(spare_bytes)
        return made if isinstance(made, CompiledPlan) else None

    made = plan(0)
    return made if isinstance(made, NotCompiled) else CompiledFitted(workload, made, replan, eager)


def _refusal(workload: Workload, request: Mapping[str, Any]) -> str | None:
    """Why compiled plans are not for this workload or this request."""
    if workload.loss is None:
        return "inference saves nothing for backward, so there is nothing to plan"
    if request.get("own_loop"):
        return "compiled plans run whole steps, and `own_loop=True` asks for another"
    if "remat" in request.get("forbid", ()):
        return "compiled plans recompute activations, and `forbid` has `remat`"
    return None


def _offer(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The place that saved tensors may go to, and how fast; ``None`` where they may not."""
    offer: Mapping[str, Any] | None = request.get("offload")
    return None if "offload" in request.get("forbid", ()) else offer


def _graphs(workload: Workload) -> Sequence[Recorded] | NotCompiled:
    """The joint graphs of the step."""
    assert workload.loss is not None, "only training steps are compiled"
    try:
        graphs = record(workload.model, workload.loss, workload.batch, workload.autocasting)
    except Exception as error:  # noqa: BLE001 - whatever dynamo cannot trace runs eager instead
        first = (str(error).strip().splitlines() or [""])[0]
        return NotCompiled(f"torch cannot trace the step: {type(error).__name__}: {first}")
    finally:
        workload.model.zero_grad(set_to_none=True)
    if not any(graph.joint is not None for graph in graphs):
        reasons = [graph.reason for graph in graphs if graph.reason]
        return NotCompiled(reasons[0] if reasons else "the step has no graph with a backward")
    return graphs


def _plan(
    graphs: Sequence[Recorded],
    beside: BesideGraphs,
    budget_bytes: int,
    beyond_bytes: int,
    *,
    fused: bool,
    offer: Mapping[str, Any] | None,
    place: Place | None,
) -> CompiledPlan | NotCompiled:
    """Plan for a budget, of graphs that take so many bytes beyond what is told of them.

    They are told by the model of Inductor (``fused``) where the step will be measured.
    """
    if beside.optimizer_peak_bytes > budget_bytes:
        return NotCompiled(f"the optimizer step takes {bytes_text(beside.optimizer_peak_bytes)}")
    room = budget_bytes - beyond_bytes
    shares = divide(graphs, beside.static_bytes, room, fused=fused, place=place)
    of_graphs = max(share.peak_bytes for share in shares)
    peak = max(beside.optimizer_peak_bytes, of_graphs + beyond_bytes)
    if peak > budget_bytes:
        return NotCompiled(f"compiled, the step takes {peak} bytes at least", least_bytes=peak)
    chosen = [share.chosen for share in shares if share.chosen is not None]
    window_bytes = max((one.schedule.window_bytes for one in chosen), default=0)
    reports = tuple(_report(share, beyond_bytes) for share in shares)
    answer = answers.CompiledPlan(
        verdict="fits",
        budget_bytes=budget_bytes,
        planned=answers.PlannedPeak(predicted_peak_bytes=peak),
        actions=_actions(chosen, beside.actions),
        graphs=reports,
    )
    return CompiledPlan(
        answer,
        _partitioner(shares, fused=fused, place=place if window_bytes else None),
        reports,
        budget_bytes,
        beyond_bytes,
        added_seconds=sum(one.seconds for one in chosen),
        step_seconds=sum(one.graph_seconds for one in chosen),
        around=beside.actions,
        offer=offer if window_bytes else None,
        window_bytes=window_bytes,
    )


def _partitioner(shares: Sequence[Share], *, fused: bool, place: Place | None) -> Partitioner:
    """What cuts the graphs by their shares; graphs that look alike get what all of them can."""
    targets: dict[str, int] = {}
    released: dict[str, set[int]] = {}
    for share in shares:
        name, joint = share.recorded.signature, share.recorded.joint
        targets[name] = min(targets.get(name, share.target_bytes), share.target_bytes)
        gone = set(joint.released_outputs() if joint else ())
        released[name] = gone & released.get(name, gone)
    otherwise = min(targets.values())
    return Partitioner(targets, otherwise, released=released, fused=fused, place=place)


def _report(share: Share, beyond_bytes: int) -> CompiledGraph:
    chosen, joint = share.chosen, share.recorded.joint
    if chosen is None or joint is None:
        peak = share.peak_bytes + beyond_bytes
        return CompiledGraph(
            ops=0,
            saved_bytes=0,
            offloaded_bytes=0,
            recomputed_ops=0,
            predicted_peak_bytes=peak,
            unplanned_peak_bytes=peak,
            reason=share.recorded.reason,
        )
    return CompiledGraph(
        ops=len(joint.ops),
        saved_bytes=chosen.schedule.saved_bytes,
        offloaded_bytes=chosen.schedule.away_bytes,
        recomputed_ops=chosen.recomputed_ops,
        predicted_peak_bytes=share.peak_bytes + beyond_bytes,
        unplanned_peak_bytes=share.outside_bytes + chosen.unplanned_peak_bytes + beyond_bytes,
        reason="",
    )


def _actions(
    graphs: Sequence[Chosen], around: Sequence[Mapping[str, Any]]
) -> tuple[CompiledAction, ...]:
    """What is done to the graphs and around them, in the words of the engine's plans."""
    schedules = [graph.schedule for graph in graphs]
    counts: dict[Kind, int] = {
        "remat": sum(graph.recomputed_ops for graph in graphs),
        "offload": sum(len(schedule.settled) for schedule in schedules),
    }
    of_graphs = (
        CompiledAction(kind=kind, promise="equivalent", count=count)
        for kind, count in counts.items()
        if count
    )
    return (*of_graphs, *(read(CompiledAction, action) for action in around))
