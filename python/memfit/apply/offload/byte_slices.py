"""Offloaded bytes that belong to the numbers of one parameter, a slice of them in memory.

Responsible for :class:`ByteSlices`, of which no more than one slice is read at a time. Not
responsible for what the bytes stand for (:mod:`memfit.apply.precision.eight_bit_state`) nor for
moving them (:mod:`memfit.apply.offload.tiers`).

A slice that cannot be written stays in memory, and goes with the next update or before the next
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfit.errors import OffloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memfit.apply.offload.tiers import Parcel, Tier

SLICE = 1 << 20
"""Numbers of a slice, as the engine has it (``EightBitState::SLICE_NUMBERS``)."""


def slices_of(numbers: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each slice of so many numbers."""
    for start in range(0, numbers, SLICE):
        yield start, min(start + SLICE, numbers)


class ByteSlices:
    """Bytes of which a slice is in memory while somebody uses it; those never written are zero.

    Attributes:
        tier: Where they go.
    """

    def __init__(
        self, numbers: int, bytes_of: Callable[[int], int], device: torch.device, tier: Tier
    ) -> None:
        """All of them are zero, and nothing is written.

        Args:
            numbers: How many numbers they go with.
            bytes_of: How many bytes go with so many numbers.
            device: Where they are used.
            tier: Where they go.
        """
        self.tier = tier
        self._device = device
        self._sizes = [bytes_of(stop - start) for start, stop in slices_of(numbers)]
        self._slices: list[Parcel | Tensor | None] = [None] * len(self._sizes)

    def read(self, number: int) -> Tensor:
        """A slice, in memory of its own.

        Args:
            number: Which.

        Raises:
            OffloadError: It did not come back as it went.
        """
        held = self._slices[number]
        if isinstance(held, Tensor):
            return held
        make = torch.zeros if held is None else torch.empty
        piece = make(self._sizes[number], dtype=torch.uint8, device=self._device)
        if held is not None:
            held.fetch(piece)
        return piece

    def write(self, number: int, piece: Tensor) -> None:
        """Have a slice be this, and go if it can.

        Args:
            number: Which.
            piece: Its bytes, in memory of their own.
        """
        try:
            self._send(number, piece)
        except OffloadError:
            self._slices[number] = piece  # said when it is sent again

    def send_left(self) -> None:
        """Send what could not go before.

        Raises:
            OffloadError: It cannot now, and stays in memory.
        """
        for number, held in enumerate(self._slices):
            if isinstance(held, Tensor):
                self._send(number, held)

    def left(self) -> list[Tensor]:
        """What could not go."""
        return [held for held in self._slices if isinstance(held, Tensor)]

    def zero_(self) -> None:
        """Have all of them be zero."""
        self._slices = [None] * len(self._sizes)

    def _send(self, number: int, piece: Tensor) -> None:
        parcel = self.tier.send(piece)
        parcel.settle()
        self._slices[number] = parcel
