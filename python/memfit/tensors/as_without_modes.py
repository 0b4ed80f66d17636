"""Formulas of autograd that torch computes in another way under a dispatch mode, as without one.

Some of them write in place to a tensor that they have just made, unless a dispatch mode is on the
stack (``isTensorSubclassLike`` in ``ATen/TensorSubclassLikeUtils.h``): then they make another
tensor, and for a moment both are there.
A step that is recorded under a mode would take more than the one that runs without it. Responsible
for doing in place under memfit's own modes what torch does in place without them: the numbers are
the same either way. Not responsible for the formulas that a mode replaces by others
(``prod_backward``, ``cumprod_backward``), nor for sums of gradients that meet in the engine, nor
for the bias of a linear layer, which slices of layers know as it is under a mode.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten = torch.ops.aten
_SCATTER = {_aten.scatter.src: _aten.scatter_.src}

_ELEMENTWISE = {_aten.sub.Tensor, _aten.mul.Tensor}

IN_PLACE: dict[str, dict[Any, Any]] = {
    "BinaryCrossEntropyWithLogitsBackward": {
        _aten.sub.Tensor: _aten.sub_.Tensor,
        _aten.mul.Tensor: _aten.mul_.Tensor,
    },
    "GatherBackward": {_aten.scatter_add.default: _aten.scatter_add_.default},
    "IndexBackward": {_aten.index_put.default: _aten.index_put_.default},
    "IndexSelectBackward": {_aten.index_add.default: _aten.index_add_.default},
    "MaskedSelectBackward": {_aten.masked_scatter.default: _aten.masked_scatter_.default},
    "TakeBackward": {_aten.put.default: _aten.put_.default},
    "TraceBackward": {_aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar},
    **dict.fromkeys(
        (
            "KthvalueBackward",
            "MaxBackward",
            "MedianBackward",
            "MinBackward",
            "ModeBackward",
            "NanmedianBackward",
            "SortBackward",
            "TopkBackward",
        ),
        _SCATTER,
    ),
}
"""By the node of autograd, without its number: ops of its formula, and what they are in place.

From ``torch/csrc/autograd/FunctionsManual.cpp`` and ``ATen/native``; the first argument is what is
written to, where the formula has made it.
"""


class Formulas:
    """The formula of autograd that runs, and what it has made so far."""

    def __init__(self) -> None:
        """Know of none."""
        self._node: int | None = None
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def in_place(self, node: int, name: str, func: Any, args: Sequence[Any]) -> Any:
        """The op that a formula would run without a mode.

        Args:
            node: Sequence number of its node.
            name: The name of that node; empty for a function of the user's.
            func: The op that it runs under a mode.
            args: Its arguments.

        Returns:
            The op in place, or ``func`` where that is it.
        """
        if node != self._node:
            self._node = node
            self._made.clear()
        instead = IN_PLACE.get(name.rstrip("0123456789"), {}).get(func)
        if instead is None or torch.is_grad_enabled():
            return func
        made = self._made.get(id(args[0]))
        is_made = made is not None and made() is args[0]
        return instead if is_made and _keeps_shape(func, args) else func

    def has_made(self, result: Any) -> None:
        """Know what an op of the formula returned."""
        if isinstance(result, Tensor):
            self._made[id(result)] = weakref.ref(result)


def _keeps_shape(func: Any, args: Sequence[Any]) -> bool:
    """Whether a result has the shape of the first argument, to which it is to be written."""
    if func not in _ELEMENTWISE:
        return True
    shapes = (it.shape for it in args if isinstance(it, Tensor))
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return bool(shape == args[0].shape)
