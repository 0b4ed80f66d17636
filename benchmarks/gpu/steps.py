"""One step, measured: its peaks, what it takes when held to a budget, and its bits.

Responsible for the peaks of the second step on, for a run inside a budget that torch's allocator
enforces, and for the comparison of two ways to run a step, after one of eager with itself. Not
responsible for times (:mod:`benchmarks.gpu.timing`). The comparison is that of `memfit verify`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from benchmarks.gpu.device import Device, Peaks
from torch import Tensor

from memfit import Workload
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.verify import eager as verifying

WHAT = ("loss", "gradients", "parameters", "buffers")
"""What of two steps is compared."""

_MEASURED_STEPS = 2


def ordinary(workload: Workload) -> tuple[Workload, Fitted]:
    """A workload whose optimizer exists, and its step without a plan."""
    fitted = Fitted(workload, {"actions": []})
    return replace(workload, optimizer=fitted.optimizer), fitted


def peaks(step: Callable[[], Any], workload: Workload, device: Device) -> Peaks:
    """The peaks of a step, from its second run on: by then the optimizer has its state.

    Args:
        step: The step; it runs three times.
        workload: What it is a step of; its optimizer exists.
        device: Where it runs.
    """
    step()
    gc.collect()
    if not device.is_gpu:
        static = static_tensors(workload, workload.optimizer)  # type: ignore[arg-type]
        return Peaks(measure_peak(step, static).peak_bytes, None)
    device.synchronize()
    device.give_back_free()
    device.forget_peaks()
    for _ in range(_MEASURED_STEPS):
        step()
    device.synchronize()
    return device.peaks()


def held(step: Callable[[], Any], device: Device, budget_bytes: int) -> dict[str, Any]:
    """Run a step while torch's allocator may reserve no more than a budget; of a GPU only.

    Args:
        step: The step, which has run before.
        device: The GPU.
        budget_bytes: The budget.

    Returns:
        ``ran``, ``retries`` (times the allocator gave its cache back to find room) and
        ``peak_reserved_bytes``; where it did not run, ``error``.
    """
    gc.collect()
    device.synchronize()
    device.give_back_free()
    _, total_bytes = device.memory()
    before = device.retries()
    device.hold_to(min(budget_bytes / total_bytes, 1.0))
    device.forget_peaks()
    try:
        for _ in range(_MEASURED_STEPS):
            step()
        device.synchronize()
        found: dict[str, Any] = {"ran": True}
    except torch.OutOfMemoryError as error:
        found = {"ran": False, "error": str(error).partition("\n")[0]}
    finally:
        device.hold_to(1.0)
    reserved = device.peaks().reserved_bytes
    return {**found, "retries": device.retries() - before, "peak_reserved_bytes": reserved}


class Bits:
    """Whether ways to run a step give the bits that eager gives.

    Where eager does not give its own bits twice, torch is asked for deterministic algorithms; where
    it still does not, nothing can be asked of a plan, and that is said.

    Attributes:
        control: How far eager is from itself, as :func:`memfit.verify.eager.compare` says it.
        is_deterministic: Whether torch was asked for deterministic algorithms.
    """

    def __init__(self, workload: Workload, eager: Fitted) -> None:
        """Run eager twice, or four times."""
        self._workload = workload
        self._state = verifying.State.of(workload)
        self.is_deterministic = False
        self._expected, self.control = self._twice(eager)
        if not is_bitwise(self.control):
            self.is_deterministic = True
            self._ask(deterministic=True)
            self._expected, self.control = self._twice(eager)
            self._ask(deterministic=False)

    def of(self, way: Fitted) -> dict[str, Any]:
        """How far a way to run the step is from eager; the workload is as before afterwards."""
        self._ask(deterministic=self.is_deterministic)
        try:
            return verifying.compare(self._expected, self._observe(way))
        finally:
            self._ask(deterministic=False)

    def _twice(self, eager: Fitted) -> tuple[verifying.Observed, dict[str, Any]]:
        expected = self._observe(eager)
        return expected, verifying.compare(expected, self._observe(eager))

    def _observe(self, way: Fitted) -> verifying.Observed:
        try:
            with verifying.random_state_kept():
                return verifying.observe(self._workload, way)
        finally:
            self._state.restore(self._workload)

    @staticmethod
    def _ask(*, deterministic: bool) -> None:
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        # Filling what is only allocated would cost time and tell nothing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]


def is_bitwise(compared: dict[str, Any]) -> bool:
    """Whether all that was compared has the same bits."""
    return all(compared[what]["agreement"] == "bitwise" for what in WHAT)


def error_of(compared: dict[str, Any]) -> float:
    """The largest relative error of all that was compared."""
    return max(float(compared[what]["max_relative_error"]) for what in WHAT)


def as_row(found: Peaks) -> dict[str, Any]:
    """Peaks as figures of a row."""
    return {f"peak_{name}": value for name, value in asdict(found).items()}


def bytes_on(workload: Workload, device: Device) -> int:
    """Bytes of model and batch on the device."""
    from torch.utils._pytree import tree_leaves

    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    tensors += [leaf for leaf in tree_leaves(workload.batch) if isinstance(leaf, Tensor)]
    return sum(t.nbytes for t in tensors if t.device.type == device.kind)
