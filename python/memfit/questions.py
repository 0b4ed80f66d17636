"""The questions a person asks of memfit: trace, predict, plan, fit.

Responsible for the public functions and their defaults. Not responsible for recording
(:mod:`memfit.capture`), for the numbers (the engine), or for running a planned step
(:mod:`memfit.fitted`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from memfit import _native
from memfit.answers import Front, Plan, Prediction, Trace
from memfit.capture import capture
from memfit.capture.alternatives import with_alternatives
from memfit.costs import offer, profiled, roofline
from memfit.elastic import Elastic
from memfit.errors import DoesNotFit, NotCompiledWarning, UsageError
from memfit.fitted import Fitted
from memfit.guarding.recovery import Recovery
from memfit.leases import Lease
from memfit.workload import Workload

Allowed = Literal["exact", "equivalent", "approximate"]
"""The loosest class of action that may be considered where a stricter one fits."""

Kind = Literal[
    "remat",
    "fuse_optimizer",
    "micro_batch",
    "allocator_settings",
    "offload",
    "offload_optimizer",
    "offload_parameters",
    "chunk",
]
"""A technique."""


def trace(
    workload: Workload,
    *,
    target: str = "",
    device: Literal["cpu", "cuda"] | None = None,
    slices: bool = False,
) -> Trace:
    """Record what one step does to memory, without running it where that is possible.

    Args:
        workload: The step; its model, gradients and the random state stay as they are.
        target: A name for reports.
        device: Kind of device to capture for; ``None`` for the one the model is on.
        slices: Record the step in slices too, where that is possible. Planning for a workload does
            so when it needs to; a trace that is planned for later has only what is in it.

    Returns:
        The trace.

    Raises:
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    recorded = Trace.decode(capture(workload, target=target, device=device))
    if not slices:
        return recorded
    return Trace(with_alternatives(workload, recorded.native, device=device))


def predict(
    subject: Workload | Trace, *, budget: str | int | None = None, batch: int | None = None
) -> Prediction:
    """Say how much memory a step takes, and what takes it.

    Args:
        subject: The step, or a trace of it.
        budget: ``"3GiB"``, ``"60%"`` or bytes: asks for the largest batch that fits.
        batch: Another batch size than the captured one.

    Returns:
        The prediction; ``print`` shows the report.

    Raises:
        BudgetError: The budget cannot be read.
        UsageError: The trace cannot be scaled to the batch.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    request = {"batch": batch, "budget": None if budget is None else str(budget)}
    return Prediction(_native.predict(_trace(subject).native, json.dumps(request)))


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
    recorded = _trace(subject)
    source = _Costs(profile, None if costs is None else Path(costs), gpu)
    workload = subject if isinstance(subject, Workload) else None
    choice = _Choice(allow, own_loop, tuple(forbid), _place(offload))
    return _plan(recorded, source.of(recorded, workload), budget, choice, workload, time_limit)


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
    recorded = _trace(subject)
    source = _Costs(profile, None if costs is None else Path(costs), gpu)
    workload = subject if isinstance(subject, Workload) else None
    op_times = source.of(recorded, workload)
    request = {
        "budget": None if budget is None else str(budget),
        "own_loop": own_loop,
        "forbid": list(forbid),
        "offload": _offer(recorded, op_times, _place(offload)),
    }
    recorded = _in_slices(recorded, workload, {"allow": "equivalent", "forbid": list(forbid)})
    return Front(_native.front(recorded.native, op_times, json.dumps(request)))


def fit(
    workload: Workload,
    budget: str | int | None = None,
    *,
    lease: Lease | None = None,
    allow: Allowed = "exact",
    own_loop: bool = False,
    forbid: Sequence[Kind] = (),
    offload: str | PathLike[str] | None = None,
    profile: bool = False,
    costs: str | PathLike[str] | None = None,
    gpu: str | None = None,
    compile: bool = False,  # noqa: A002 - the word people know from torch
    guard: bool = False,
) -> Fitted:
    """Plan a step and apply the plan.

    Args:
        workload: The step; the model is used as it is.
        budget: As in :func:`plan`; not with a ``lease``.
        lease: Stay within what a lease holds on the step's device, less what this process takes
            there besides; with a ``floor`` it gives way between steps when another needs room, and
            takes it again later. See ``fitted.elastic``.
        allow: As in :func:`plan`.
        own_loop: As in :func:`plan`; then use ``with fitted.forward():``.
        forbid: As in :func:`plan`.
        offload: As in :func:`plan`.
        profile: As in :func:`plan`.
        costs: As in :func:`plan`.
        gpu: As in :func:`plan`.
        compile: Run the loss under ``torch.compile``, its graphs cut for the budget; equivalent
            class. Where that cannot be, the step runs eager; a warning and ``report()`` say why.
        guard: Refuse what would bring the tensors of this process above the budget while a step
            runs, whoever holds them; a refused step is put back and run by a tighter plan. See
            :func:`memfit.guard` for what counts. With a ``lease`` the budget is what it holds, less
            what the process takes besides tensors, and follows it.

    Returns:
        The fitted workload: ``fitted.step(batch)`` runs one step inside the budget. With
        ``compile``, a :class:`memfit.compiled.fitted.CompiledFitted`.

    Raises:
        DoesNotFit: No allowed plan brings the step under the budget.
        BudgetError: The budget cannot be read.
        UsageError: As in :func:`plan`; both or neither of ``budget`` and ``lease``; a lease that is
            too small for this process; ``guard`` with ``own_loop`` or ``compile``.
        OffloadError: The plan offloads, and the folder cannot be used.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    _refuse_guard(asked=guard, with_other=compile or own_loop)
    elastic, within = _within(workload, budget, lease, compiled=compile)
    limit = elastic.hold() if elastic is not None and guard else None
    recorded = trace(workload)
    meta = _meta(recorded)
    source = _Costs(profile, None if costs is None else Path(costs), gpu)
    choice = _Choice(allow, own_loop, tuple(forbid), _place(offload))
    op_times = source.of(recorded, workload)
    made = _plan(recorded, op_times, within, choice, workload)

    def replan(batch: Any) -> dict[str, Any] | None:
        """Plan again for a batch that the step was not captured with.

        The budget stays the same number of bytes, also where it was given as a percentage.
        """
        other = replace(workload, batch=batch)
        moved = trace(other)
        room = made.budget_bytes if elastic is None else elastic.budget_bytes
        again = _plan(moved, source.roofline(moved), room, choice, other)
        return again.as_dict() if again.fits else None

    def plan_again(batch: Any, budget_bytes: int) -> Plan:
        """Plan the step with a batch for a number of bytes, whether that fits or not."""
        is_own = batch is workload.batch
        subject = workload if is_own else replace(workload, batch=batch)
        moved = recorded if is_own else trace(subject)
        return _plan(moved, source.roofline(moved), budget_bytes, choice, subject)

    def eager(optimizer: Any, not_compiled: str = "") -> Fitted:
        """The workload fitted by the eager plan."""
        return Fitted(
            replace(workload, optimizer=optimizer),
            made.as_dict(),
            loss_reduction=meta["loss_reduction"],
            replan=replan,
            not_compiled=not_compiled,
            recovery=Recovery(workload, made.budget_bytes, plan_again, limit) if guard else None,
        )

    not_compiled = ""
    if compile:
        instead = eager if made.fits else None
        compiled = _compiled(workload, recorded, op_times, made.budget_bytes, choice, instead)
        if isinstance(compiled, Fitted):
            return compiled
        not_compiled = compiled
    if not made.fits:
        message = (
            f"no allowed plan brings the step under {made.budget_bytes} bytes: "
            f"the smallest peak found is {made.minimum_peak_bytes} bytes, "
            f"the smallest budget to ask for {made.minimum_budget_bytes}"
        )
        if not_compiled:
            message += f"; nor does a compiled one: {not_compiled}"
        raise DoesNotFit(
            message,
            minimum_peak_bytes=made.minimum_peak_bytes,
            minimum_budget_bytes=made.minimum_budget_bytes,
            plan=made,
        )
    if not_compiled:
        warnings.warn(f"the step runs eager: {not_compiled}", NotCompiledWarning, stacklevel=2)
    fitted = eager(workload.optimizer, not_compiled)
    if elastic is not None:
        fitted.elastic = elastic
        elastic.drive(
            fitted,
            made,
            lambda budget, seconds: _plan(recorded, op_times, budget, choice, workload, seconds),
        )
    return fitted


def _refuse_guard(*, asked: bool, with_other: bool) -> None:
    """Refuse a guard together with what it cannot put back and run again."""
    if asked and with_other:
        raise UsageError(
            "`guard=True` puts back and runs again whole eager steps\n"
            "hint: run your own loop, or compiled steps, inside `with memfit.guard(...)`"
        )


def _within(
    workload: Workload, budget: str | int | None, lease: Lease | None, *, compiled: bool
) -> tuple[Elastic | None, str | int]:
    """What a step has to stay within: the lease if there is one, and the budget."""
    if lease is None:
        if budget is None:
            raise UsageError("give a `budget`, or a `lease` to stay within")
        return None, budget
    if budget is not None:
        raise UsageError("give a `budget`, or a `lease` to stay within, and not both")
    if compiled:
        raise UsageError("a compiled step cannot follow a lease: give a `budget`")
    elastic = Elastic(lease, workload)
    return elastic, elastic.budget_bytes


def _compiled(
    workload: Workload,
    recorded: Trace,
    op_times: str,
    budget_bytes: int,
    choice: _Choice,
    eager: Callable[[Any], Fitted] | None,
) -> Fitted | str:
    """The workload fitted under ``torch.compile``, or why it cannot be."""
    from memfit.compiled import toolchain

    missing = toolchain.missing(_meta(recorded)["device_kind"])
    if missing is not None:
        return missing
    from memfit.compiled.fit import fit_compiled

    request = {
        "own_loop": choice.own_loop,
        "forbid": list(choice.forbid),
        "offload": _offer(recorded, op_times, choice.place),
        "profile": json.loads(op_times).get("profile") or {},
    }
    found = fit_compiled(workload, json.loads(recorded.json()), budget_bytes, request, eager)
    return found if isinstance(found, Fitted) else found.reason


def _meta(recorded: Trace) -> dict[str, str]:
    """Where a trace comes from, as the engine has it."""
    meta: dict[str, str] = json.loads(recorded.json())["meta"]
    return meta


@dataclass(frozen=True, slots=True)
class _Costs:
    """Where op times are asked to come from."""

    profile: bool
    file: Path | None
    gpu: str | None

    def __post_init__(self) -> None:
        if self.profile + (self.file is not None) + (self.gpu is not None) > 1:
            raise UsageError("op times have one source: give one of `profile`, `costs` and `gpu`")

    def of(self, recorded: Trace, workload: Workload | None) -> str:
        """The engine's cost source."""
        if not self.profile:
            return self.roofline(recorded)
        if workload is None:
            raise UsageError("`profile=True` runs the model: give the workload, not its trace")
        return profiled(workload, recorded.native)

    def roofline(self, recorded: Trace) -> str:
        """The engine's cost source, without running the model."""
        device_kind = _meta(recorded)["device_kind"]
        if self.gpu is not None and device_kind != "cuda":
            raise UsageError(f"`gpu` names a GPU and the step runs on `{device_kind}`")
        return roofline(device_kind, self.file, self.gpu)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which plans are allowed."""

    allow: Allowed
    own_loop: bool
    forbid: tuple[Kind, ...]
    place: str | None


def _plan(
    recorded: Trace,
    costs: str,
    budget: str | int,
    choice: _Choice,
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
        "offload": _offer(recorded, costs, choice.place),
    }
    recorded = _in_slices(recorded, workload, request)
    made = _native.plan(recorded.native, costs, json.dumps(request), time_limit)
    wider = _in_slices(recorded, workload, request, made)
    if wider is not recorded:
        made = _native.plan(wider.native, costs, json.dumps(request), time_limit)
    return Plan(made)


def _in_slices(
    recorded: Trace, workload: Workload | None, request: dict[str, Any], made: str | None = None
) -> Trace:
    """The trace with the step in slices, where that may make for a better plan."""
    if workload is None or not recorded.native.wants_alternatives(json.dumps(request), made):
        return recorded
    return Trace(with_alternatives(workload, recorded.native))


def _place(offload: str | PathLike[str] | None) -> str | None:
    return None if offload is None else fspath(offload)


def _offer(recorded: Trace, costs: str, place: str | None) -> dict[str, Any] | None:
    """How fast the place for what is offloaded is; ``None`` where there is none."""
    if place is None:
        return None
    return offer(_meta(recorded)["device_kind"], place, json.loads(costs).get("profile") or {})


def _trace(subject: Workload | Trace) -> Trace:
    if isinstance(subject, Trace):
        return subject
    if isinstance(subject, Workload):
        return trace(subject)
    message = f"expected a `memfit.Workload` or a `memfit.Trace`, got `{type(subject).__name__}`"
    raise UsageError(message)
