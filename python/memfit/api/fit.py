"""Planning a step and running it by the plan: :func:`memfit.fit`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from memfit._native import bytes_text
from memfit.answers import Plan, Trace
from memfit.api.plan import op_times_of
from memfit.api.predict import trace
from memfit.errors import DoesNotFit, NotCompiledWarning, UsageError
from memfit.options import OptionKeywords, Options
from memfit.plan.planner import compiled_request, meta_of, op_times_without_run, plan_trace
from memfit.run.elastic import Elastic
from memfit.run.fitted import Fitted
from memfit.run.recovery import Recovery
from memfit.share.lease import Lease
from memfit.sizes import step_budget
from memfit.workload import Workload, workload_of


def fit(
    workload: Workload,
    budget: str | int | None = None,
    options: Options | None = None,
    *,
    plan: Plan | None = None,
    lease: Lease | None = None,
    compile: bool = False,  # noqa: A002 - the word people know from torch
    guard: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> Fitted:
    """Plan a step and apply the plan.

    Args:
        workload: The step; the model is used as it is.
        budget: As in :func:`plan`; not with a ``lease`` or a ``plan``.
        options: As in :func:`plan`; with ``own_loop`` use ``with fitted.forward():``.
        plan: Run by this plan of the workload, from :func:`plan` or :func:`load`, within its own
            budget; other batches are planned for as they come.
        lease: Stay within what a lease holds on the step's device, less what this process takes
            there otherwise; with a ``floor`` it gives way between steps when another needs room,
            and takes it again later. See ``fitted.elastic``.
        compile: Run the loss under ``torch.compile``, its graphs cut for the budget; equivalent
            class. Where that cannot be, the step runs eager; a warning and ``report()`` say why.
        guard: Refuse what would bring the tensors of this process above the budget while a step
            runs, whoever holds them; a refused step is put back and run by a tighter plan. See
            :func:`memfit.guard` for what counts. With a ``lease`` the budget is what it holds, less
            what the process takes apart from tensors, and follows it.
        **keywords: As in :func:`plan`.

    Returns:
        The fitted workload: ``fitted.step(batch)`` runs one step inside the budget. With
        ``compile``, a :class:`memfit.run.compiled.fitted.CompiledFitted`.

    Raises:
        DoesNotFit: No allowed plan brings the step under the budget.
        BudgetError: The budget cannot be read.
        UsageError: As in :func:`plan`; not just one of ``budget``, ``plan`` and ``lease``; a lease
            that is too small for this process; ``guard`` with ``own_loop`` or ``compile``.
        OffloadError: The plan offloads, and the folder cannot be used.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    workload = workload_of(workload)
    chosen = Options.of(options, **keywords)
    _refuse_guard(asked=guard, with_other=compile or chosen.own_loop)
    elastic, within = _within(workload, budget, plan, lease, compiled=compile)
    limit = elastic.hold() if elastic is not None and guard else None
    recorded = trace(workload)
    meta = meta_of(recorded)
    op_times = op_times_of(chosen, recorded, workload)
    made = plan or plan_trace(recorded, op_times, within, chosen, workload)

    def again(moved: Trace, subject: Workload, budget_bytes: int) -> Plan:
        """Plan for another batch or budget, without running the model."""
        return plan_trace(moved, op_times_without_run(moved, chosen), budget_bytes, chosen, subject)

    def replan(batch: Any) -> Plan | None:
        """Plan again for a batch that the step was not captured with.

        The budget stays the same number of bytes, also where it was given as a percentage.
        """
        other = replace(workload, batch=batch)
        moved = trace(other)
        room = made.budget_bytes if elastic is None else elastic.budget_bytes
        found = again(moved, other, room)
        return found if found.fits else None

    def plan_again(batch: Any, budget_bytes: int) -> Plan:
        """Plan the step with a batch for a number of bytes, whether that fits or not."""
        is_own = batch is workload.batch
        subject = workload if is_own else replace(workload, batch=batch)
        moved = recorded if is_own else trace(subject)
        return again(moved, subject, budget_bytes)

    def eager(optimizer: Any, not_compiled: str = "") -> Fitted:
        """The workload fitted by the eager plan."""
        return Fitted(
            replace(workload, optimizer=optimizer),
            made,
            loss_reduction=meta["loss_reduction"],
            replan=replan,
            not_compiled=not_compiled,
            recovery=Recovery(workload, made.budget_bytes, plan_again, limit) if guard else None,
        )

    not_compiled = ""
    if compile:
        instead = eager if made.fits else None
        compiled = _compiled(workload, recorded, op_times, made.budget_bytes, chosen, instead)
        if isinstance(compiled, Fitted):
            return compiled
        not_compiled = compiled
    if not made.fits:
        raise does_not_fit(made, not_compiled)
    if not_compiled:
        warnings.warn(f"the step runs eager: {not_compiled}", NotCompiledWarning, stacklevel=2)
    fitted = eager(workload.optimizer, not_compiled)
    if elastic is not None:
        fitted.elastic = elastic
        elastic.drive(
            fitted,
            made,
            lambda budget, seconds: plan_trace(
                recorded, op_times, budget, replace(chosen, time_limit=seconds), workload
            ),
        )
    return fitted


def _refuse_guard(*, asked: bool, with_other: bool) -> None:
    """Refuse a guard together with what it cannot put back and run again."""
    if asked and with_other:
        raise UsageError(
            "`guard=True` puts back and runs again whole eager steps\n"
            "hint: run your own loop, or compiled steps, inside `with memfit.guard(...)`"
        )


def does_not_fit(made: Plan, not_compiled: str = "") -> DoesNotFit:
    """The error for a plan that is above its budget.

    Args:
        made: The plan.
        not_compiled: Why a compiled step does not fit either, if one was asked for.
    """
    message = (
        f"no allowed plan brings the step under {bytes_text(made.budget_bytes)}: the smallest "
        f"peak found is {bytes_text(made.minimum_peak_bytes)}, the smallest budget to ask for "
        f"{bytes_text(made.minimum_budget_bytes)} ({made.minimum_budget_bytes} bytes)"
    )
    if not_compiled:
        message += f"; nor does a compiled one: {not_compiled}"
    if (beyond := made.next_class) is not None:
        message += (
            f"\nhint: with leave, `allow={beyond.promise!r}`, a step would take "
            f"{bytes_text(beyond.predicted_peak_bytes)}, at {beyond.predicted_step_ratio:.2f} x"
        )
    return DoesNotFit(
        message,
        minimum_peak_bytes=made.minimum_peak_bytes,
        minimum_budget_bytes=made.minimum_budget_bytes,
        plan=made,
    )


def _within(
    workload: Workload,
    budget: str | int | None,
    plan: Plan | None,
    lease: Lease | None,
    *,
    compiled: bool,
) -> tuple[Elastic | None, str | int]:
    """What a step has to stay within: the lease if there is one, and the budget."""
    if plan is not None:
        if budget is not None or lease is not None or compiled:
            raise UsageError("a `plan` has a budget of its own, and is for eager steps")
        return None, plan.budget_bytes
    if lease is None:
        if budget is None:
            raise UsageError("give a `budget`, or a `lease` to stay within")
        return None, step_budget(budget)
    if budget is not None:
        raise UsageError("give a `budget`, or a `lease` to stay within, and not both")
    if compiled:
        raise UsageError("a compiled step cannot follow a lease: give a `budget`")
    elastic = Elastic(lease, workload)
    return elastic, elastic.budget_bytes


def _compiled(
    workload: Workload,
    recorded: Trace,
    op_times: Mapping[str, Any],
    budget_bytes: int,
    options: Options,
    eager: Callable[[Any], Fitted] | None,
) -> Fitted | str:
    """The workload fitted under ``torch.compile``, or why it cannot be."""
    from memfit.run.compiled import toolchain

    missing = toolchain.missing(meta_of(recorded)["device_kind"])
    if missing is not None:
        return missing
    from memfit.run.compiled.fit import fit_compiled

    request = compiled_request(recorded, op_times, options)
    found = fit_compiled(workload, json.loads(recorded.json()), budget_bytes, request, eager)
    return found if isinstance(found, Fitted) else found.reason
