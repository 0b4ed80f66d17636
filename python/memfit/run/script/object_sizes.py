"""How large objects are that a model is called with: batches of graphs, images with their masks.

Steps of other sizes are other steps, and a batch may come as an object of the script's or of a
library. Responsible for the tensors that such objects hold. Not responsible for what follows from
their sizes (:mod:`memfit.run.script.step_plans`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 3
"""Objects inside objects that are looked into."""

_MOST = 4096
"""Values that are looked at."""

_NO_DATA = (nn.Module, ModuleType, FunctionType, MethodType, type)

Size = tuple[tuple[int], torch.dtype]
"""Elements of all tensors of one name, and their type."""


def object_sizes(leaves: Iterable[Any]) -> list[Size]:
    """Elements of the tensors that objects hold, for each name; of a list of graphs, of all.

    Args:
        leaves: What a model is called with, out of lists and tuples.
    """
    totals: Counter[tuple[str, torch.dtype]] = Counter()
    left = [_MOST]
    for leaf in leaves:
        for name, tensor in _held(leaf, type(leaf).__name__, _DEPTH, left):
            totals[name, tensor.dtype] += tensor.numel()
    return [((total,), dtype) for (_, dtype), total in totals.items()]


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
