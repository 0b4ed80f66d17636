"""How large the things are that a model is called with: tensors, lists of items, batches of graphs.

Steps of other sizes are other steps. A batch may come as an object of the script's or of a library,
or as a list of items, each with a size of its own: no two such lists are alike, tensor by tensor,
but a step takes what all of them take together. Responsible for the sizes of what is given. Not
responsible for what follows from them (:mod:`memfit.run.script.step_plans`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_MANY = 8
"""Entries of a list or a tuple above which they are items of a batch."""

_INSIDE = 2
"""How deep arguments are in what a model is called with: in the tuple of those without names."""

_DEPTH = 3
"""Objects inside objects that are looked into."""

_MOST = 4096
"""Values that are looked at."""

_NO_DATA = (nn.Module, ModuleType, FunctionType, MethodType, type)

Size = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and type; of all tensors of one name, their elements."""


def given_sizes(inputs: Any) -> list[Size]:
    """Shapes of the tensors that a model is called with; of many items, the elements of all.

    And those of the largest, to which others may be padded.

    Args:
        inputs: What it is called with.
    """
    found: dict[str, list[Tensor]] = {}
    for name, tensor in _given(inputs, ""):
        found.setdefault(name, []).append(tensor)
    sizes: list[Size] = []
    for tensors in found.values():
        if len(tensors) == 1:
            sizes.append((tuple(tensors[0].shape), tensors[0].dtype))
        else:
            sizes += _totals(("", it) for it in tensors)
            sizes += _largest(tensors)
    return sizes


def object_sizes(leaves: Iterable[Any]) -> list[Size]:
    """Elements of the tensors that objects hold, for each name; of a list of graphs, of all.

    Args:
        leaves: What a model is called with, out of lists and tuples.
    """
    left = [_MOST]
    return _totals(
        found for leaf in leaves for found in _held(leaf, type(leaf).__name__, _DEPTH, left)
    )


def _totals(named: Iterable[tuple[str, Tensor]]) -> list[Size]:
    totals: Counter[tuple[str, torch.dtype]] = Counter()
    for name, tensor in named:
        totals[name, tensor.dtype] += tensor.numel()
    return [((total,), dtype) for (_, dtype), total in totals.items()]


def _largest(tensors: Iterable[Tensor]) -> list[Size]:
    largest: dict[torch.dtype, int] = {}
    for tensor in tensors:
        largest[tensor.dtype] = max(largest.get(tensor.dtype, 0), tensor.numel())
    return [((elements,), dtype) for dtype, elements in largest.items()]


def _given(it: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are given, with their places; those of items have one name."""
    if isinstance(it, (list, tuple)):
        # Not the arguments themselves, nor what has a name for each entry.
        is_batch = depth >= _INSIDE and len(it) > _MANY and not hasattr(it, "_fields")
        entries: Iterable[tuple[Any, Any]] = enumerate(it)
    elif isinstance(it, dict):
        is_batch, entries = False, it.items()
    else:
        found = (leaf for leaf in tree_leaves(it) if isinstance(leaf, Tensor))
        yield from ((f"{name}:{number}", leaf) for number, leaf in enumerate(found))
        return
    for place, entry in entries:
        yield from _given(entry, f"{name}." if is_batch else f"{name}.{place}", depth + 1)


def _held(it: Any, name: str, depth: int, left: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in an object, with the names that lead there; nothing of it runs."""
    if isinstance(it, Tensor):
        yield name, it
        return
    if depth == 0 or isinstance(it, _NO_DATA):
        return
    values = dict(it) if type(it) is dict else getattr(it, "__dict__", None)
    if not isinstance(values, Mapping):
        return
    for key, value in list(values.items()):
        if left[0] == 0:
            return
        left[0] -= 1
        yield from _held(value, f"{name}.{key}", depth - 1, left)
