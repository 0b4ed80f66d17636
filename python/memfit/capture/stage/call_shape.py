"""The shape of one call of an op: everything that decides how much scratch it takes.

Responsible for describing a call without holding its tensors, and for building like arguments
again. Not responsible for running it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_SMALL_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What it takes to make a tensor like the one a call was given.

    Attributes:
        shape: Sizes, outermost first.
        stride: Strides in elements.
        dtype: Element type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def like(self) -> Tensor:
        """A fresh tensor of this shape: zeros for integers, which are indices, else ones."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return tensor.fill_(0 if self.dtype in _SMALL_INTEGERS else 1)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one op, with tensors replaced by their shapes.

    Attributes:
        func: The op overload.
        args: Positional arguments.
        kwargs: Keyword arguments.
        key: Equal for calls that take the same scratch.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str

    def build(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like those of the call, with fresh tensors.

        Returns:
            Positional and keyword arguments.
        """
        built = tree_map(
            lambda leaf: leaf.like() if isinstance(leaf, TensorShape) else leaf,
            (self.args, self.kwargs),
        )
        return built[0], built[1]

    @property
    def argument_bytes(self) -> int:
        """Bytes of all tensor arguments together."""
        total = 0

        def add(leaf: Any) -> Any:
            nonlocal total
            if isinstance(leaf, TensorShape):
                total += leaf.bytes
            return leaf

        tree_map(add, (self.args, self.kwargs))
        return total


def describe_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Describe a call without keeping its tensors alive.

    Args:
        func: The op overload.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The description.
    """

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorShape(tuple(leaf.shape), leaf.stride(), leaf.dtype)
        return leaf

    plain_args, plain_kwargs = tree_map(shape, (args, kwargs))
    return Call(func, plain_args, plain_kwargs, f"{func} {plain_args} {plain_kwargs}")
