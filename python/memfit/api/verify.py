"""A plan beside real steps: :func:`memfit.verify`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

from torch import nn

from memfit import _native
from memfit.answers import Plan, Trace, Verification
from memfit.api.plan import op_times_of
from memfit.api.predict import trace
from memfit.errors import UsageError
from memfit.options import OptionKeywords, Options
from memfit.plan.planner import compiled_request, meta_of, plan_trace
from memfit.sizes import step_budget
from memfit.verify import compiled, eager
from memfit.workload import Workload, workload_of


def verify(
    subject: Workload | Callable[[], Workload],
    budget: str | int | None = None,
    options: Options | None = None,
    *,
    plan: Plan | None = None,
    compile: bool = False,  # noqa: A002 - as in `memfit.fit`
    steps: int = 3,
    max_error: float | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Verification:
    """Run real steps with and without a plan, and compare peaks, times and numbers.

    Args:
        subject: The step, or a function that builds it. A given model, its gradients, its
            optimizer's state and the random state are afterwards as before.
        budget: As in :func:`memfit.plan`; not with a ``plan``.
        options: As in :func:`memfit.plan`.
        plan: The plan to hold to its word.
        compile: Compare with a compiled plan and with ``torch.compile`` alone, where the step
            compiles; ``not_compiled`` says why it does not.
        steps: Steps of each that are timed.
        max_error: Most that an approximate plan may change gradients by, as a part of what other
            examples would change, 0.1 unless it is given; or the outputs of inference, as a part
            of their length, 0.05.
        **keywords: As in :func:`memfit.plan`.

    Returns:
        The verification: ``holds`` says whether peak and numbers are as promised. Where no plan
        fits, nothing runs.

    Raises:
        UsageError: As in :func:`memfit.plan`; not just one of ``budget`` and ``plan``.
        BudgetError: The budget cannot be read.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    if (budget is None) == (plan is None) or (plan is not None and compile):
        raise UsageError("give a `budget`, or a `plan` of eager steps to verify")
    if steps < 1:
        raise UsageError(f"`steps={steps}`: at least one step is timed")
    is_part = isinstance(max_error, (int, float)) and 0 < max_error < float("inf")
    if max_error is not None and not is_part:
        raise UsageError(f"`max_error={max_error!r}` is no part of anything: write `0.1` for 10 %")
    chosen = Options.of(options, **keywords)
    within = "" if budget is None else step_budget(budget)
    if callable(subject) and not isinstance(subject, nn.Module):
        subject = subject()
    workload = workload_of(subject)
    began = time.perf_counter()
    recorded = trace(workload)
    captured = time.perf_counter()
    op_times = op_times_of(chosen, recorded, workload)
    made = plan or plan_trace(recorded, op_times, within, chosen, workload)
    seconds = (captured - began, time.perf_counter() - captured)
    with _as_before(workload):
        document, text = _ran(
            workload, recorded, made, chosen, op_times, (steps, max_error), seconds, compile
        )
    return Verification.told(document, text)


@contextlib.contextmanager
def _as_before(workload: Workload) -> Iterator[None]:
    """Put parameters, buffers, optimizer state and gradients back on leaving.

    Steps inside begin without gradients: what is there would be added to.
    """
    before = eager.State.of(workload)
    gradients = [(parameter, parameter.grad) for parameter in workload.model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        before.restore(workload)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _ran(
    workload: Workload,
    recorded: Trace,
    made: Plan,
    options: Options,
    op_times: Mapping[str, Any],
    wanted: tuple[int, float | None],
    seconds: tuple[float, float],
    compile: bool,  # noqa: A002, FBT001
) -> tuple[dict[str, Any], str]:
    """The document and the text of what real steps gave."""
    plan = made.as_dict()
    steps, max_error = wanted
    if compile:
        measured = _measured_compiled(workload, recorded, made, options, op_times, steps)
        document, text = _native.verification(plan, measured, True, *seconds)  # noqa: FBT003
        if "not_compiled" not in measured:
            return document, text
        not_compiled = measured["not_compiled"]
    if not made.fits:
        document, text = _native.verification(plan, None, False, *seconds)  # noqa: FBT003
    else:
        found = eager.verify(
            lambda: workload, plan, steps=steps, loss_reduction=made.loss_reduction
        )
        for how_far in ("approximation", "outputs"):
            if how_far in found and max_error is not None:
                found[how_far]["max_error"] = max_error
        document, text = _native.verification(plan, found, False, *seconds)  # noqa: FBT003
    if compile:
        document["not_compiled"] = not_compiled
    return document, text


def _measured_compiled(
    workload: Workload,
    recorded: Trace,
    made: Plan,
    options: Options,
    op_times: Mapping[str, Any],
    steps: int,
) -> dict[str, Any]:
    """What compiled steps gave, or why the step does not compile."""
    from memfit.run.compiled import toolchain

    missing = toolchain.missing(meta_of(recorded)["device_kind"])
    if missing is not None:
        return {"not_compiled": missing}
    request = compiled_request(recorded, op_times, options)
    trace_of = json.loads(recorded.json())
    return compiled.verify_compiled(
        lambda: workload, trace_of, made.budget_bytes, request, steps=steps
    )
