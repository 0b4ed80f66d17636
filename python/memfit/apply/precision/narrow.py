"""Activations held in fewer bits between forward and backward.

Responsible for the forms of a plan's ``shrink`` action, as places that the executor sends a tensor
to and fetches it from: the bytes stay on the tensor's device, in ``bfloat16`` or in blocks of 8
bits (``crates/memfit-memory/src/narrow.rs`` says what a block is). Nothing else is allocated on a
CPU; on a GPU, numbers go in slices. Not responsible for when (:mod:`memfit.apply.offload`) nor for
which (the engine).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfit import _native
from memfit.apply.offload.tiers import Moved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memfit.apply.offload.tiers import Parcel
    from memfit.apply.remat.records import Narrow

BLOCK = 256
"""Numbers that share a scale, as the engine has it (``Narrow::BLOCK``)."""
_SLICE = 1 << 20
"""Numbers that torch ops work on at once, in whole blocks."""
_MOST, _MOST_BESIDE_OTHERS = 127.0, 124.0
_INFINITE, _NOT_A_NUMBER = 126, 127
"""Codes, as the kernel has them."""


class NarrowTier:
    """One form, as a place for tensors of 32-bit floating-point numbers.

    Attributes:
        folder: Empty.
    """

    folder = ""

    def __init__(self, to: Narrow) -> None:
        """Hold nothing yet.

        Args:
            to: Which form.
        """
        self._to = to

    def refusal(self, device: torch.device) -> str | None:
        """Why tensors on ``device`` cannot be held so; ``None`` when they can."""
        if device.type in {"cpu", "cuda"}:
            return None
        return f"is on `{device.type}`, where memfit holds no numbers in fewer bits"

    def send(self, source: Tensor) -> Parcel:
        """Write the storage of ``source`` in this form."""
        numbers = torch.empty(0, dtype=torch.float32, device=source.device)
        storage = source.untyped_storage()
        numbers.set_(storage, 0, (storage.nbytes() // numbers.itemsize,), (1,))
        return _Half(numbers) if self._to == "half" else _EightBit(numbers)

    def moved(self) -> Moved:
        """Nothing leaves its device."""
        return Moved()


class Here:
    """What is there from the start, and asked for without notice."""

    __slots__ = ()

    def settle(self) -> None:
        """It is written."""

    def fetch(self, target: Tensor) -> None:
        """Write it in 32 bits."""
        raise NotImplementedError

    def prefetch(self, target: Tensor) -> None:
        """Write it in 32 bits at once."""
        self.fetch(target)

    def wait(self) -> None:
        """It is there."""


class _Half(Here):
    """Numbers in ``bfloat16``: those that are not finite stay so."""

    __slots__ = ("_held",)

    def __init__(self, numbers: Tensor) -> None:
        self._held = numbers.to(torch.bfloat16)

    def fetch(self, target: Tensor) -> None:
        target.view(torch.float32).copy_(self._held)


class _EightBit(Here):
    """Numbers in 8 bits, in blocks with a scale of their own."""

    __slots__ = ("_held",)

    def __init__(self, numbers: Tensor) -> None:
        count = numbers.numel()
        blocks = -(-count // BLOCK)
        size = count + torch.float32.itemsize * blocks
        self._held = torch.empty(size, dtype=torch.uint8, device=numbers.device)
        if numbers.device.type == "cpu":
            _native.shrink_numbers(
                memory_of(numbers), memory_of(self._held), torch.get_num_threads()
            )
        else:
            shrink_by_ops(numbers, self._held)

    def fetch(self, target: Tensor) -> None:
        if target.device.type == "cpu":
            _native.expand_numbers(
                memory_of(self._held), memory_of(target), torch.get_num_threads()
            )
        else:
            expand_by_ops(self._held, target.view(torch.float32))


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor whose numbers lie densely.

    Args:
        tensor: The tensor, on a CPU.
    """
    return tensor.data_ptr(), tensor.nbytes


def shrink_by_ops(numbers: Tensor, held: Tensor) -> None:
    """Write numbers in 8 bits by torch's ops: the bits are the kernel's.

    Args:
        numbers: One dimension of 32-bit floating-point numbers.
        held: Where they go: bytes, codes first.
    """
    count = numbers.numel()
    for part, codes, at in _slices(numbers, held):
        block = part.view(-1, min(BLOCK, part.numel()))
        is_finite = block.isfinite()
        all_finite = is_finite.all(1)
        largest = torch.where(is_finite, block, 0.0).abs().amax(1)
        scale = torch.where(all_finite, largest / _MOST, largest / _MOST_BESIDE_OTHERS)
        inverse = torch.nan_to_num(1.0 / scale, nan=0.0, posinf=0.0)
        whole = (torch.where(is_finite, block, 0.0) * inverse[:, None]).round_()
        whole = torch.where(block.isinf(), block.sign() * _INFINITE, whole)
        whole = torch.where(block.isnan(), float(_NOT_A_NUMBER), whole)
        codes.view(torch.int8).copy_(whole.view(-1))
        scales = torch.where(all_finite, scale, -scale)
        held[count + at : count + at + scales.nbytes].copy_(scales.view(torch.uint8))


def expand_by_ops(held: Tensor, numbers: Tensor) -> None:
    """Write numbers of 8 bits in 32 by torch's ops; as :func:`shrink_by_ops`.

    Args:
        held: Bytes, codes first.
        numbers: Where they go: one dimension of 32-bit floating-point numbers.
    """
    count = numbers.numel()
    for part, codes, at in _slices(numbers, held):
        block = part.view(-1, min(BLOCK, part.numel()))
        size = block.shape[0] * torch.float32.itemsize
        # A copy lies where numbers of 32 bits may.
        scale = held[count + at : count + at + size].clone().view(torch.float32)[:, None]
        code = codes.view(torch.int8).view(block.shape)
        torch.mul(code, scale.abs(), out=block)
        others = scale.signbit()
        block.masked_fill_(others & (code == _INFINITE), float("inf"))
        block.masked_fill_(others & (code == -_INFINITE), float("-inf"))
        block.masked_fill_(others & (code == _NOT_A_NUMBER), float("nan"))


def _slices(numbers: Tensor, held: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Whole blocks of numbers, with their codes and where their scales begin; the rest at last."""
    count = numbers.numel()
    whole = count - count % BLOCK
    starts = [*range(0, whole, _SLICE), *([whole] if whole < count else [])]
    for start in starts:
        stop = min(start + _SLICE, whole) if start < whole else count
        scales_at = start // BLOCK * torch.float32.itemsize
        yield numbers[start:stop], held[start:stop], scales_at
