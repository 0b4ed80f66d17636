"""Recording a step and predicting what it takes: :func:`memfit.trace`, :func:`memfit.predict`."""

from __future__ import annotations

from typing import Literal

from memfit import _native
from memfit.answers import Prediction, Trace
from memfit.capture import capture
from memfit.plan.alternatives import with_alternatives
from memfit.sizes import step_budget
from memfit.workload import Workload, workload_of


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
    recorded = Trace.decode(
        capture(workload_of(workload), target=target, device=device, compare_graph=True)
    )
    if not slices:
        return recorded
    return Trace(
        with_alternatives(workload, recorded.native, recorded.native.ways(), device=device)
    )


def predict(
    subject: Workload | Trace,
    *,
    budget: str | int | None = None,
    batch: int | None = None,
    gpu: str | None = None,
) -> Prediction:
    """Say how much memory a step takes, and what takes it.

    Args:
        subject: The step, or a trace of it.
        budget: ``"3GiB"``, ``"60%"`` or bytes: asks for the largest batch that fits.
        batch: Another batch size than the captured one.
        gpu: A GPU that need not be here (``"rtx4090"``), instead of a budget: ``prediction.gpu``
            says whether the step fits on it. A workload is captured for CUDA then.

    Returns:
        The prediction; ``print`` shows the report.

    Raises:
        BudgetError: The budget cannot be read.
        UsageError: The trace cannot be scaled to the batch; no such GPU is known, or the trace is
            of a step on a CPU; both a GPU and a budget are given.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    request = {
        "batch": batch,
        "budget": None if budget is None else step_budget(budget),
        "gpu": gpu,
    }
    if gpu is not None:
        _native.gpu_profile(gpu)  # an unknown name is refused before the step is captured
        if not isinstance(subject, Trace):
            subject = trace(subject, device="cuda")
    return Prediction.of(_native.predict(traced(subject).native, request))


def traced(subject: Workload | Trace) -> Trace:
    """The trace of a step, or the trace itself.

    Args:
        subject: Either.

    Raises:
        UsageError: It is neither.
    """
    return subject if isinstance(subject, Trace) else trace(subject)
