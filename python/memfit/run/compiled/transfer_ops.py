"""Saved tensors of compiled graphs that are elsewhere between forward and backward: as they move.

Responsible for three operators that memfit writes into graphs
(:mod:`memfit.run.compiled.transfer_nodes`): one that sends a tensor out, one that waits until it is
written, one that has it back and begins the next. Inductor calls them as it calls any custom
operator. What crosses from forward to backward is a ticket, eight bytes. Not responsible for moving
bytes (:mod:`memfit.apply.offload.tiers`).

Inductor uses the memory of a tensor again once nothing in the graph reads it, whoever else refers
to it; so the second operator reads the tensor as well, and until then its memory stays as it was.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.apply.offload.tiers import Moved, Parcel, Tier
from memfit.errors import OffloadError


@dataclass(slots=True)
class _Away:
    """A tensor that is elsewhere.

    Attributes:
        parcel: Its bytes.
        size: Its shape.
        stride: Its strides.
        dtype: Its type.
        device: Its device.
        leaving: The tensor itself, until its bytes are elsewhere.
        coming: Where it comes to, once that was begun.
    """

    parcel: Parcel
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    leaving: Tensor | None
    coming: Tensor | None = None


class Transit:
    """What one step has elsewhere.

    Attributes:
        sent: Tensors that left in the last step.
    """

    def __init__(self, tier: Tier) -> None:
        """Create it with nothing elsewhere.

        Args:
            tier: Where tensors go.
        """
        self.sent = 0
        self._tier = tier
        self._numbers: list[int] = []

    def send(self, source: Tensor) -> int:
        """Begin to send a tensor out; the number of its ticket.

        Raises:
            OffloadError: It, or one before it, cannot be written.
        """
        size, stride = tuple(source.size()), tuple(source.stride())
        if source.untyped_storage().nbytes() != source.numel() * source.element_size():
            source = source.clone()  # It looks at a part of other memory, which may be needed.
        number, parcel = next(_NUMBERS), self._tier.send(source)
        _AWAY[number] = _Away(parcel, size, stride, source.dtype, source.device, source)
        self._numbers.append(number)
        self.sent += 1
        return number

    def moved(self) -> Moved:
        """What the tier did so far."""
        return self._tier.moved()

    def forget(self) -> None:
        """Let go of all that is elsewhere: nobody will ask for it."""
        for number in self._numbers:
            away = _AWAY.pop(number, None)
            if away is not None:
                del away.parcel  # before the memory that a transfer under way reads or fills
        self._numbers.clear()


_NUMBERS = itertools.count()
_AWAY: dict[int, _Away] = {}
"""By ticket: backward of one device may run in another thread than forward."""

_STEP = threading.local()
"""The transit of the step that this thread runs; what a graph's forward calls is in no other."""


@contextlib.contextmanager
def moving(transit: Transit | None) -> Iterator[None]:
    """While it lasts, graphs that this thread runs send tensors by this transit.

    Args:
        transit: The transit; ``None`` for steps whose graphs send nothing.
    """
    before = getattr(_STEP, "transit", None)
    _STEP.transit = transit
    if transit is not None:
        transit.sent = 0
    try:
        yield
    finally:
        _STEP.transit = before
        if transit is not None:
            transit.forget()


@torch.library.custom_op(
    "memfit::send_away", mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
)
def send_away(source: Tensor) -> Tensor:
    """Begin to send a tensor out, which must stay as it is until :func:`settle`.

    Args:
        source: The tensor.

    Returns:
        Its ticket.

    Raises:
        OffloadError: It cannot be written, or no step of a fitted workload is running.
    """
    transit = getattr(_STEP, "transit", None)
    if transit is None:
        raise OffloadError(
            "a compiled graph that offloads tensors ran outside its step\n"
            "hint: run it by `Fitted.step`"
        )
    return torch.tensor([transit.send(source)])


@torch.library.custom_op("memfit::settle", mutates_args=())
def settle(ticket: Tensor, source: Tensor) -> Tensor:
    """Wait until a tensor is written.

    Args:
        ticket: What :func:`send_away` returned.
        source: The tensor, whose memory is free to be used again afterwards.

    Returns:
        The ticket.

    Raises:
        OffloadError: It was not written.
    """
    del source
    away = _away(ticket)
    away.parcel.settle()
    away.leaving = None
    return ticket.clone()


@torch.library.custom_op("memfit::fetch", mutates_args=())
def fetch(
    ticket: Tensor,
    following: Sequence[Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Have a tensor back, and begin to have the following ones.

    Args:
        ticket: What :func:`settle` returned.
        following: Tickets of those that will be asked for next.
        size: Its shape.
        stride: Its strides.
        dtype: Its type.
        device: Its device.

    Returns:
        The tensor.

    Raises:
        OffloadError: Its bytes did not come back as they went.
    """
    away = _away(ticket)
    target = _begin(away)
    for next_ticket in following:
        _begin(_away(next_ticket))
    away.parcel.wait()
    del _AWAY[int(ticket)]
    if (away.size, away.stride, away.dtype) != (tuple(size), tuple(stride), dtype):
        raise OffloadError(
            f"a tensor of {list(size)} with strides {list(stride)} was asked for, and one of "
            f"{list(away.size)} with strides {list(away.stride)} had left"
        )
    assert away.device == device, "graphs do not move tensors between devices unseen"
    return target.view(dtype).as_strided(away.size, away.stride)


@send_away.register_fake
@settle.register_fake
def _(*_: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@fetch.register_fake
def _(_ticket: Tensor, _following: Sequence[Tensor], *what: Any) -> Tensor:
    size, stride, dtype, device = what
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _away(ticket: Tensor) -> _Away:
    found = _AWAY.get(int(ticket))
    if found is None:
        raise OffloadError(
            "a tensor that a compiled graph has offloaded was asked for after its step\n"
            "hint: run forward and backward by `Fitted.step`"
        )
    return found


def _begin(away: _Away) -> Tensor:
    """Where a tensor comes to, begun now if it was not."""
    if away.coming is None:
        size_bytes = math.prod(away.size) * away.dtype.itemsize
        away.coming = torch.empty(size_bytes, dtype=torch.uint8, device=away.device)
        away.parcel.prefetch(away.coming)
    return away.coming
