"""How the result of an op lies that computes element by element, known from what it reads.

Responsible for when a result would lie as the op's first tensor does, so that it may be written
over that one. Not responsible for who else may read it there.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Types whose ops make what they read."""


def decides_layout(first: Tensor, *others: Tensor) -> bool:
    """Whether a result has the shape, the type and the order of the op's first tensor.

    Torch orders a result's dimensions by the strides of what is read, the first tensor's first
    (``TensorIteratorBase::reorder_dimensions``). Those of a dense tensor without dimensions of one
    element leave nothing open.

    Args:
        first: The first tensor that the op reads.
        others: What else it reads.
    """
    if not all(_is_within(first, other) for other in others):
        return False
    if first.is_contiguous() and all(
        other.is_contiguous() or other.numel() < first.numel() for other in others
    ):
        return True
    return 1 not in first.shape and _is_dense(first)


def _is_within(first: Tensor, other: Tensor) -> bool:
    # Of a number in a tensor of its own torch takes the value alone.
    is_number = not other.dim() and first.dim() and other.dtype in PLAIN
    if other.dtype is not first.dtype and not is_number:
        return False
    sizes = zip(other.shape[::-1], first.shape[::-1], strict=False)
    return other.dim() <= first.dim() and all(size in (1, own) for size, own in sizes)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it lies without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True
