"""Planning a step: :func:`memfit.plan` for one budget, :func:`memfit.pareto` for many."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from memfit.answers import Front, Plan, Trace
from memfit.api.predict import traced
from memfit.errors import UsageError
from memfit.options import Allowed, Kind
from memfit.plan.planner import Choice, CostSource, front_of_trace, place_name, plan_trace
from memfit.run.profile import profiled
from memfit.workload import Workload


def plan(
    subject: Workload | Trace,
    budget: str | int,
    *,
    allow: Allowed = "exact",
    own_loop: bool = False,
    forbid: Sequence[Kind] = (),
    offload: str | PathLike[str] | None = None,
    profile: bool = False,
    costs: str | PathLike[str] | None = None,
    gpu: str | None = None,
    time_limit: float | None = None,
) -> Plan:
    """Find the fastest way to make a step fit a budget.

    Args:
        subject: The step, or a trace of it.
        budget: ``"3GiB"``, ``"800MiB"``, ``"2GB"``, ``"60%"`` of the unplanned peak, or bytes.
        allow: Loosest class to consider even where a stricter one fits.
        own_loop: Only plan what works inside the caller's own loop.
        forbid: Kinds of action to leave out.
        offload: Where activations and optimizer state may be offloaded to: a folder for files, or
            ``"host"`` for the host's memory (steps on CUDA). ``None`` for nowhere.
        profile: Take op times from one real step; the subject must be a workload.
        costs: Take them from a profile that ``memfit calibrate`` wrote. By default, the one kept
            for this machine if it matches, else a quick measurement.
        gpu: Take them from a GPU's datasheet (``"h100"``), for a step on CUDA.
        time_limit: Answer after about so many seconds with the best plan found; by default the
            limit is on work, so that the answer is the same everywhere.

    Returns:
        The plan, whether it fits or not: see ``fits`` and ``minimum_peak_bytes``.

    Raises:
        BudgetError: The budget cannot be read.
        UsageError: ``profile`` without a workload, an unreadable ``costs``, an unknown ``gpu``, or
            more than one of the three; a place for offloading that cannot be used; a
            ``time_limit`` that is not positive.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    recorded = traced(subject)
    source = CostSource(profile, None if costs is None else Path(costs), gpu)
    workload = subject if isinstance(subject, Workload) else None
    choice = Choice(allow, own_loop, tuple(forbid), place_name(offload))
    return plan_trace(
        recorded, op_times_of(source, recorded, workload), budget, choice, workload, time_limit
    )


def pareto(
    subject: Workload | Trace,
    *,
    budget: str | int | None = None,
    own_loop: bool = False,
    forbid: Sequence[Kind] = (),
    offload: str | PathLike[str] | None = None,
    profile: bool = False,
    costs: str | PathLike[str] | None = None,
    gpu: str | None = None,
) -> Front:
    """Plan a step for many budgets: step time against peak.

    Exact and equivalent plans each have a front of their own.

    Args:
        subject: The step, or a trace of it.
        budget: A budget to plan for besides, as in :func:`plan`; marked in the plot.
        own_loop: As in :func:`plan`.
        forbid: As in :func:`plan`.
        offload: As in :func:`plan`.
        profile: As in :func:`plan`.
        costs: As in :func:`plan`.
        gpu: As in :func:`plan`.

    Returns:
        The front; ``save("front.html")`` draws it.

    Raises:
        BudgetError: The budget cannot be read.
        UsageError: ``profile`` without a workload, an unreadable ``costs``, an unknown ``gpu``, or
            more than one of the three.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    recorded = traced(subject)
    source = CostSource(profile, None if costs is None else Path(costs), gpu)
    workload = subject if isinstance(subject, Workload) else None
    choice = Choice("equivalent", own_loop, tuple(forbid), place_name(offload))
    op_times = op_times_of(source, recorded, workload)
    return front_of_trace(recorded, op_times, budget, choice, workload)


def op_times_of(source: CostSource, recorded: Trace, workload: Workload | None) -> str:
    """The engine's cost source, which may take a real step to find.

    Args:
        source: Where op times are asked to come from.
        recorded: The trace.
        workload: The workload that it is of.

    Raises:
        UsageError: The step is to be profiled and there is no workload; no such profile or GPU.
    """
    if not source.profile:
        return source.roofline(recorded)
    if workload is None:
        raise UsageError("`profile=True` runs the model: give the workload, not its trace")
    return profiled(workload, recorded.native)
