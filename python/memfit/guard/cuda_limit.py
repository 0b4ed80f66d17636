"""A budget for what the process takes of a CUDA device.

Responsible for the share of the device that torch's caching allocator may reserve: the budget less
what is taken past it, measured anew whenever an optimizer has stepped or a model was parked or
woken. Not responsible for the words of the error (:mod:`memfit.guard.refused`).

Past the caching allocator go the CUDA context, loaded kernels, NCCL and whatever else allocates by
itself. No budget can refuse those: when they grow, torch's share shrinks. The driver only tells
what all processes take together, so what others hold on the device counts as taken too. A guard
then refuses earlier than it must, never later.
"""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import torch

from memfit._native import bytes_text
from memfit.errors import BudgetError, OutOfBudget, UsageError
from memfit.guard.refused import Refusal, error_of
from memfit.track.steps import STEPS

_ASKED = re.compile(
    r"CUDA out of memory\. .*?(?:Tried to allocate|Requested size:) ([\d.]+) (bytes|KiB|MiB|GiB)"
)
_SHARE = re.compile(r" allowed; |per_process_memory_fraction limit")
"""Torch's words where it has a share of the device."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class CudaOutOfBudget(OutOfBudget, torch.OutOfMemoryError):
    """:class:`~memfit.errors.OutOfBudget` where torch raises ``torch.OutOfMemoryError``."""


class _Device:
    """The limits on one device, and its share before the first of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.share_before = float(torch.cuda.get_per_process_memory_fraction(device))
        self.limits: list[CudaLimit] = []

    def refresh(self) -> None:
        """Set torch's share to the tightest budget less what is taken past torch."""
        budget_bytes = min(limit.budget_bytes for limit in self.limits)
        _, total_bytes = torch.cuda.mem_get_info(self.device)
        allowed_bytes = max(0, budget_bytes - non_torch_bytes(self.device))
        share = min(_share(allowed_bytes, total_bytes), self.share_before)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def restore(self) -> None:
        """Give torch the share that it had."""
        torch.cuda.set_per_process_memory_fraction(self.share_before, self.device)


_lock = threading.RLock()
_devices: dict[int, _Device] = {}


def non_torch_bytes(device: torch.device) -> int:
    """What is taken of a device past torch's caching allocator."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, int(total_bytes - free_bytes) - int(torch.cuda.memory_reserved(device)))


def existing(device: torch.device) -> torch.device:
    """A CUDA device that is here, with its number.

    Args:
        device: The device; without an index, the current one.

    Raises:
        UsageError: There is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count or (device.index or 0) >= count:
        message = f"there is no device `{device}` here: torch sees {count} CUDA devices"
        raise UsageError(message)
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


class CudaLimit:
    """A budget on a CUDA device.

    Attributes:
        budget_bytes: The budget.
    """

    device_type = "cuda"

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        """Prepare it; torch's share is not touched before it is set.

        Args:
            budget_bytes: The budget.
            device: The device; without an index, the current one.

        Raises:
            UsageError: There is no such device.
        """
        self.budget_bytes = budget_bytes
        self._device = existing(device)

    def set(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        with _lock:
            self._refuse_too_small()
            on_device = _devices.get(self._device.index)
            if on_device is None:
                on_device = _devices[self._device.index] = _Device(self._device)
            if self not in on_device.limits:
                on_device.limits.append(self)
            on_device.refresh()
            STEPS.watch()
            if _refresh not in STEPS.listeners:
                STEPS.listeners.append(_refresh)

    def change(self, budget_bytes: int) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        with _lock:
            before = self.budget_bytes
            self.budget_bytes = budget_bytes
            try:
                self._refuse_too_small()
                self._refuse_segments()
            except BudgetError:
                self.budget_bytes = before
                raise
            on_device = _devices.get(self._device.index)
            if on_device is not None and self in on_device.limits:
                on_device.refresh()

    def refresh(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`: done after every optimizer step."""

    def _refuse_too_small(self) -> None:
        taken = non_torch_bytes(self._device) + int(torch.cuda.memory_allocated(self._device))
        if taken > self.budget_bytes:
            message = (
                f"{bytes_text(taken)} of `{self._device}` are taken, more than the budget of "
                f"{bytes_text(self.budget_bytes)}"
            )
            raise BudgetError(message)
        if self.in_use_bytes() > self.budget_bytes:
            torch.cuda.empty_cache()

    def loosen(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        self.end()

    def _refuse_segments(self) -> None:
        """Refuse a budget that segments with live blocks exceed: they cannot be given back."""
        in_use_bytes = self.in_use_bytes()
        if in_use_bytes > self.budget_bytes:
            message = (
                f"{bytes_text(in_use_bytes)} of `{self._device}` are taken, or lie in segments "
                f"that are in use: more than the budget of {bytes_text(self.budget_bytes)}"
            )
            raise BudgetError(message)

    def end(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        with _lock:
            on_device = _devices.get(self._device.index)
            if on_device is None or self not in on_device.limits:
                return
            on_device.limits.remove(self)
            if on_device.limits:
                on_device.refresh()
                return
            on_device.restore()
            del _devices[self._device.index]
            if not _devices and _refresh in STEPS.listeners:
                STEPS.listeners.remove(_refresh)

    def in_use_bytes(self) -> int:
        """See :class:`~memfit.guard.limit.Limit`."""
        return non_torch_bytes(self._device) + int(torch.cuda.memory_reserved(self._device))

    def refused(self, error: BaseException) -> OutOfBudget | None:
        """See :class:`~memfit.guard.limit.Limit`."""
        said = _ASKED.search(str(error))
        if isinstance(error, OutOfBudget) or said is None or not _SHARE.search(str(error)):
            return None
        refusal = Refusal(
            requested_bytes=int(float(said.group(1)) * _UNITS[said.group(2)]),
            in_use_bytes=self.in_use_bytes(),
            budget_bytes=self.budget_bytes,
            is_by_system=False,
            blocks=_live_blocks(self._device),
        )
        return error_of(refusal, said.group(), device=str(self._device), kind=CudaOutOfBudget)


def measure_anew() -> None:
    """Let the share of every device that has a budget follow what is taken past torch now."""
    with _lock:
        for on_device in list(_devices.values()):
            on_device.refresh()


def _refresh(when: str, _: Any) -> None:
    """Measure anew after every step of every optimizer."""
    if when == "after":
        measure_anew()


def _share(allowed_bytes: int, total_bytes: int) -> float:
    """The largest share of which torch makes no more than the bytes allowed."""
    share = min(1.0, allowed_bytes / total_bytes)
    while int(share * total_bytes) > allowed_bytes:
        share = math.nextafter(share, 0.0)
    return share


def _live_blocks(device: torch.device) -> list[tuple[int, int, str]]:
    """Address, bytes and category of what is allocated on a device, as far as torch knows."""
    return [
        (int(block["address"]), int(block["requested_size"]), "other")
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
