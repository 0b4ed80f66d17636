"""Planning a step: :func:`memfit.plan` for one budget, :func:`memfit.pareto` for many."""

from __future__ import annotations

from typing import Any, Unpack

from memfit.answers import Front, Plan, Trace
from memfit.api.predict import traced
from memfit.errors import UsageError
from memfit.options import OptionKeywords, Options
from memfit.plan.cost_source import with_rates
from memfit.plan.planner import front_of_trace, meta_of, op_times_without_run, plan_trace
from memfit.run.profile import profiled
from memfit.sizes import step_budget
from memfit.workload import Workload


def plan(
    subject: Workload | Trace,
    budget: str | int,
    options: Options | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Plan:
    """Find the fastest way to make a step fit a budget.

    Args:
        subject: The step, or a trace of it.
        budget: ``"3GiB"``, ``"800MiB"``, ``"2GB"``, ``"60%"`` of the unplanned peak, or bytes.
        options: How it may be planned; see :class:`memfit.Options`.
        **keywords: Fields of the options, as in ``allow="equivalent"``; they go first.

    Returns:
        The plan; ``plan.fits`` says whether it does, ``print`` shows the report.

    Raises:
        BudgetError: The budget cannot be read.
        UsageError: An option that is none, ``profile`` without a workload, an unreadable ``costs``,
            an unknown ``gpu``; a place that cannot be used, or how fast it is is not known.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    chosen = Options.of(options, **keywords)
    within = step_budget(budget)
    recorded = traced(subject)
    workload = subject if isinstance(subject, Workload) else None
    op_times = op_times_of(chosen, recorded, workload)
    return plan_trace(recorded, op_times, within, chosen, workload)


def pareto(
    subject: Workload | Trace,
    options: Options | None = None,
    *,
    budget: str | int | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Front:
    """Plan a step for many budgets: step time against peak.

    Exact and equivalent plans each have a front of their own.

    Args:
        subject: The step, or a trace of it.
        options: As in :func:`plan`; ``allow`` and ``time_limit`` have no meaning here.
        budget: A budget to plan for too, as in :func:`plan`; marked in the plot.
        **keywords: As in :func:`plan`.

    Returns:
        The front; ``save("front.html")`` draws it.

    Raises:
        BudgetError: The budget cannot be read.
        UsageError: As in :func:`plan`.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    chosen = Options.of(options, **keywords)
    within = None if budget is None else step_budget(budget)
    recorded = traced(subject)
    workload = subject if isinstance(subject, Workload) else None
    op_times = op_times_of(chosen, recorded, workload)
    return front_of_trace(recorded, op_times, within, chosen, workload)


def op_times_of(options: Options, recorded: Trace, workload: Workload | None) -> dict[str, Any]:
    """The engine's cost source, which may take a real step to find.

    Args:
        options: Where op times are asked to come from.
        recorded: The trace.
        workload: The workload that it is of.

    Raises:
        UsageError: The step is to be profiled and there is no workload; no such profile or GPU.
    """
    if not options.profile:
        return op_times_without_run(recorded, options)
    if workload is None:
        raise UsageError("`profile=True` runs the model: give the workload, not its trace")
    return with_rates(profiled(workload, recorded.native), meta_of(recorded)["device_kind"])
