"""Moments in 8 bits and updates that read and write them, by torch's ops: for what is on a GPU.

Responsible for the same arithmetic as the kernel (``crates/memfit-memory/src/moments.rs`` says what
a code stands for), on slices of numbers and in room that is taken once for each parameter. What is
drawn for numbers in ``bfloat16`` are the kernel's bits; sums are rounded once more than there, so
that last bits may differ. Not responsible for which parameters are updated so, nor for when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.apply.precision.narrow import BLOCK
from memfit.tensors.narrow_parameters import join_slice, split_slice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SLICE = 1 << 20
"""Numbers that are worked on at once, in whole blocks."""

ROOM_BYTES = 18
"""Bytes that an update takes for each of them, at most: four numbers of 32 bits, and a byte each
for what is no number and for scales. Plans count on both (``EightBitState::temporary_bytes``)."""

_MOST_SIGNED, _MOST_OF_ROOTS = 127.0, 255.0
_UPPER_HALF = -(1 << 16)
"""The bits of a number that ``bfloat16`` has."""


def shrink_moment(wide: Tensor, held: Tensor, *, is_square: bool) -> None:
    """Write a moment in 8 bits.

    Args:
        wide: Its numbers, in one dimension, of 32 bits.
        held: Where they go: bytes, codes first.
        is_square: Whether it is a mean of squares.
    """
    for piece in _pieces(wide.numel(), held):
        room = _Room(piece.count, wide.device)
        numbers = wide[piece.start : piece.stop]
        if is_square:
            torch.sqrt(numbers, out=room.a)
            piece.write_roots(0, room.a, room.b, room.c)
        else:
            piece.write_signed(0, numbers, room.b, room.c)


def expand_moment(held: Tensor, wide: Tensor, *, is_square: bool) -> None:
    """Write a moment of 8 bits in 32.

    Args:
        held: Bytes, codes first.
        wide: Where its numbers go, in one dimension.
        is_square: Whether it is a mean of squares.
    """
    for piece in _pieces(wide.numel(), held):
        numbers = wide[piece.start : piece.stop]
        if is_square:
            piece.read_roots(0, numbers, 1.0)
            numbers.square_()
        else:
            piece.read_signed(0, numbers, torch.empty_like(numbers), 1.0)


def update_by_adam(
    rule: Mapping[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    lower: Tensor | None = None,
) -> None:
    """Update a parameter by Adam.

    Args:
        rule: As the kernel has it.
        parameter: Its numbers, in one dimension, of 32 bits or in ``bfloat16``.
        gradient: Those of its gradient, of the same type.
        first: The mean of gradients in 8 bits.
        second: The mean of their squares.
        lower: The lower halves of a parameter in ``bfloat16``, where they are kept.
    """
    room = _Room(min(parameter.numel(), _SLICE), parameter.device)
    for piece in _pieces(parameter.numel(), first, second):
        a, b, c, d = room.of(piece.count)
        numbers = _Numbers(parameter, lower, piece)
        slopes = gradient[piece.start : piece.stop]
        numbers.read(d, (b, c))  # first: a sum of two types takes room on a CPU
        c.copy_(slopes).add_(d, alpha=rule["penalty"] * rule["direction"])
        piece.read_signed(0, a, d, 1.0 - rule["first_added"])
        a.add_(c, alpha=rule["first_added"] * rule["direction"])
        piece.read_roots(1, b, rule["second_stays"] ** 0.5)
        b.square_().addcmul_(c, c, value=rule["second_added"]).sqrt_()
        piece.write_roots(1, b, c, d)
        piece.write_signed(0, a, c, d)
        a.div_(b.mul_(rule["root_correction"]).add_(rule["epsilon"]))
        numbers.read(d, (b, c))
        numbers.write(d.mul_(rule["decay"]).sub_(a, alpha=rule["step"]), rule["seed"], (a, b))


def update_by_momentum(
    rule: Mapping[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    held: Tensor,
    *,
    lower: Tensor | None = None,
) -> None:
    """Update a parameter by gradient descent with momentum.

    Args:
        rule: As the kernel has it.
        parameter: As in :func:`update_by_adam`.
        gradient: As there.
        held: The momentum in 8 bits.
        lower: As there.
    """
    room = _Room(min(parameter.numel(), _SLICE), parameter.device)
    again = rule["nesterov"]
    for piece in _pieces(parameter.numel(), held):
        a, b, c, d = room.of(piece.count)
        numbers = _Numbers(parameter, lower, piece)
        slopes = gradient[piece.start : piece.stop]
        numbers.read(d, (b, c))  # first: a sum of two types takes room on a CPU
        c.copy_(slopes).add_(d, alpha=rule["penalty"] * rule["direction"])
        piece.read_signed(0, a, d, rule["stays"])
        a.add_(c, alpha=rule["added"] * rule["direction"])
        piece.write_signed(0, a, b, d)
        if again is not None:
            a.mul_(again).add_(c, alpha=rule["direction"])
        numbers.read(d, (b, c))
        numbers.write(d.sub_(a, alpha=rule["step"]), rule["seed"], (a, b))


class _Room:
    """Room for four numbers of 32 bits for each of a slice."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._rows = torch.empty(4, count, dtype=torch.float32, device=device)
        self.a, self.b, self.c, self.d = self._rows.unbind()

    def of(self, count: int) -> tuple[Tensor, ...]:
        """The same for a shorter slice."""
        return tuple(row[:count] for row in (self.a, self.b, self.c, self.d))


class _Piece:
    """Some of the blocks of moments."""

    def __init__(self, held: tuple[Tensor, ...], numbers: int, start: int, stop: int) -> None:
        """Neither read nor write.

        Args:
            held: Codes and scales of each moment.
            numbers: How many each has.
            start: The first of these blocks.
            stop: One after the last of them.
        """
        self.start, self.stop, self.count = start, stop, stop - start
        self._shape = (-(-self.count // BLOCK), min(BLOCK, self.count))
        self._codes = [one[start:stop] for one in held]
        at = numbers + start // BLOCK * torch.float32.itemsize
        self._scales = [one[at : at + self._shape[0] * torch.float32.itemsize] for one in held]

    def read_signed(self, which: int, into: Tensor, room: Tensor, stays: float) -> None:
        """Write a part of the numbers of a first moment to ``into``."""
        room.copy_(self._codes[which].view(torch.int8))
        torch.abs(room, out=into).mul_(room)
        room.square_()
        unit = self._scale(which).mul_(stays / _MOST_SIGNED**4)
        into.mul_(room.view(self._shape).mul_(unit).view(-1))

    def read_roots(self, which: int, into: Tensor, stays: float) -> None:
        """Write a part of the roots of a second moment to ``into``."""
        into.copy_(self._codes[which]).square_()
        into.view(self._shape).mul_(self._scale(which).mul_(stays / _MOST_OF_ROOTS**2))

    def write_signed(self, which: int, numbers: Tensor, room: Tensor, other: Tensor) -> None:
        """Hold the numbers of a first moment."""
        scale = self._write_scale(which, torch.abs(numbers, out=room))
        per = _per(_MOST_SIGNED, scale.sqrt_().sqrt_())
        room.sqrt_().sqrt_().view(self._shape).mul_(per)
        room.round_().mul_(torch.sign(numbers, out=other)).nan_to_num_(nan=0.0)
        self._codes[which].view(torch.int8).copy_(room)

    def write_roots(self, which: int, roots: Tensor, room: Tensor, other: Tensor) -> None:
        """Hold the roots of a second moment; what is not zero does not become zero."""
        per = _per(_MOST_OF_ROOTS, self._write_scale(which, roots).sqrt_())
        torch.sqrt(roots, out=room).view(self._shape).mul_(per)
        room.clamp_(min=1.0).mul_(torch.sign(roots, out=other)).round_().nan_to_num_(nan=0.0)
        self._codes[which].copy_(room)

    def _scale(self, which: int) -> Tensor:
        # A copy lies where numbers of 32 bits may.
        return self._scales[which].clone().view(torch.float32)[:, None]

    def _write_scale(self, which: int, sizes: Tensor) -> Tensor:
        """The largest size of each block; not a number where one is not finite."""
        scale = sizes.view(self._shape).amax(1)
        scale.masked_fill_(scale.isfinite().logical_not_(), float("nan"))
        self._scales[which].copy_(scale.view(torch.uint8))
        return scale


def _per(most: float, largest: Tensor) -> Tensor:
    """Codes for each unit; none where all is zero, or not a number."""
    per = largest.reciprocal_().mul_(most)
    return per.nan_to_num_(nan=0.0, posinf=0.0)[:, None]


def _pieces(numbers: int, *held: Tensor) -> Iterator[_Piece]:
    """Slices of whole blocks; the rest at last."""
    whole = numbers - numbers % BLOCK
    starts = [*range(0, whole, _SLICE), *([whole] if whole < numbers else [])]
    for start in starts:
        stop = min(start + _SLICE, whole) if start < whole else numbers
        yield _Piece(held, numbers, start, stop)


class _Numbers:
    """A slice of a parameter."""

    def __init__(self, parameter: Tensor, lower: Tensor | None, piece: _Piece) -> None:
        self._numbers = parameter[piece.start : piece.stop]
        self._lower = None if lower is None else lower[piece.start : piece.stop]
        self._start = piece.start

    def read(self, into: Tensor, room: tuple[Tensor, Tensor]) -> None:
        """Write them to ``into``, in 32 bits; ``room`` is for as many, twice."""
        if self._lower is None:
            into.copy_(self._numbers)
            return
        off, another = (one.view(torch.int32) for one in room)
        join_slice(self._numbers, self._lower, into, (off, another))

    def write(self, after: Tensor, seed: int | None, room: tuple[Tensor, Tensor]) -> None:
        """Have them be what they are after an update.

        Args:
            after: They, in 32 bits; they are changed.
            seed: What is drawn from for numbers in ``bfloat16`` that are rounded up or down at
                random, as ``forms.rs`` says; ``None`` for others.
            room: Room for as many numbers of 32 bits, twice.
        """
        if self._lower is not None:
            split_slice(after, self._numbers, self._lower, room[0].view(torch.int32))
            return
        if seed is not None:
            is_none = after.isnan()
            bits = after.view(torch.int32)
            bits.add_(_drawn(seed, self._start, room)).bitwise_and_(_UPPER_HALF)
            after.masked_fill_(is_none, float("nan"))
        self._numbers.copy_(after)


def _drawn(seed: int, start: int, room: tuple[Tensor, Tensor]) -> Tensor:
    """16 random bits for each place, as the kernel draws them (``forms::drawn``)."""
    bits, shifted = (one.view(torch.int32) for one in room)
    torch.arange(len(bits), dtype=torch.int32, device=bits.device, out=bits)
    bits.add_(_signed(start)).mul_(_signed(0x9E37_79B1)).bitwise_xor_(_signed(seed))
    for shift, factor in ((16, 0x85EB_CA6B), (13, 0xC2B2_AE35)):
        bits.bitwise_xor_(_shifted(bits, shift, shifted)).mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 16, shifted))
    return _shifted(bits, 16, shifted)


def _shifted(bits: Tensor, by: int, into: Tensor) -> Tensor:
    """Bits shifted down, with nothing above."""
    torch.bitwise_right_shift(bits, by, out=into)
    return into.bitwise_and_((1 << (32 - by)) - 1)


def _signed(number: int) -> int:
    """A number of 32 bits as torch reads its bits."""
    number &= 0xFFFF_FFFF
    return number - (1 << 32) if number >= 1 << 31 else number
