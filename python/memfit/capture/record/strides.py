"""Strides of dimensions of size 1 on fake tensors.

Such a stride says nothing about memory, but convolutions and norms take it for part of a memory
format, and then choose other kernels. Fakes compute it by functions of their own (up to torch
2.15), so one image behind an attention would be recorded with convolutions that it does not run.

Responsible for the strides that views, element-wise ops and norms of groups really give. Not
responsible for other ops, which follow from those.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memfit.torch_versions import group_norm_laid_out

_GROUP_NORM = torch.ops.aten.native_group_norm.default
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def laid_out(result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op returns on fakes, with the strides of the real op.

    Args:
        result: What it returned on fakes.
        func: The op.
        args: Its arguments.
        kwargs: Those that are named.
    """
    if func is _GROUP_NORM:
        return group_norm_laid_out(result, args[0])
    if not isinstance(result, Tensor) or 1 not in result.shape or result.is_contiguous():
        return result
    if func in _VIEWS:
        strides = _of_view(args[0], result)
    elif torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
        strides = _of_small(result, func, args, kwargs)
    else:
        return result
    if strides == result.stride():
        return result
    return torch.as_strided(result, result.shape, strides, result.storage_offset())


def _of_view(given: Tensor, result: Tensor) -> tuple[int, ...]:
    """Strides of a view, by the kernel that real tensors have too."""
    with torch._C._DisableTorchDispatch():
        empty = torch.empty_strided(given.shape, given.stride(), device="meta")
        return empty.view(result.shape).stride()


def _of_small(
    result: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Strides of an element-wise op, by the real op on small tensors: they follow from the order.

    Every size above 1 becomes 2. Then a stride of 2 to the power of k stands for the product of the
    k innermost sizes.
    """

    def small(tensor: Tensor) -> Tensor:
        order = _innermost_first(tensor)
        strides = []
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            inside = sum(tensor.stride(dim) < stride for dim in order)
            strides.append(2**inside if size > 1 or stride else 0)
        shape = [min(size, 2) for size in tensor.shape]
        return torch.empty_strided(shape, strides, dtype=tensor.dtype).zero_()

    is_plain = all(_is_dense(it) for it in (*args, *kwargs.values()) if isinstance(it, Tensor))
    if not is_plain or not _is_dense(result):
        return result.stride()
    with torch._C._DisableTorchDispatch():
        args, kwargs = tree_map_only(Tensor, small, (args, kwargs))
        made: Tensor = func(*args, **kwargs)
    sizes = [result.shape[dim] for dim in _innermost_first(made)]
    return tuple(prod(sizes[: stride.bit_length() - 1]) for stride in made.stride())


def _innermost_first(tensor: Tensor) -> list[int]:
    """Dimensions of a size above 1, by stride."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return sorted(dims, key=tensor.stride)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements are side by side, in some order of its dimensions."""
    step = 1
    for dim in _innermost_first(tensor):
        if tensor.stride(dim) != step:
            return False
        step *= tensor.shape[dim]
    return tensor.layout is torch.strided
