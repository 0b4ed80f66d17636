"""Formulas of autograd that torch computes in another way under a dispatch mode, as without one.

Some of them write in place to a tensor that they have just made, unless a dispatch mode is on the
stack (``isTensorSubclassLike`` in ``ATen/TensorSubclassLikeUtils.h``): then they make another
tensor, and for a moment both are there. That one may also lie in another order, in which a later
sum rounds otherwise.
A step that runs under a mode would take more than the one that runs without it, and its last bits
might differ. Responsible for doing in place under memfit's own modes what torch does in place
without them, for the numbers of a product's gradient, and for naming the other formulas that a mode
replaces by ones whose numbers differ. Not responsible for telling sums of gradients that meet in
the engine (:mod:`memfit.tensors.gradient_sums`), nor for the bias of a linear layer, which slices
of layers know as it is under a mode.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction

from memfit.tensors.gradient_sums import IN_PLACE as IN_PLACE_SUM
from memfit.tensors.gradient_sums import SUM, GradientSums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_aten = torch.ops.aten
_SCATTER = {_aten.scatter.src: _aten.scatter_.src}

_ENGINES = {
    ("torch.autograd.graph", "_engine_run_backward"),
    ("memfit.capture.stage.backward_engine", "_consume"),
}
"""Functions that run nodes: torch's engine, and memfit's for a GPU that is not here."""

_ELEMENTWISE = {_aten.sub.Tensor, _aten.mul.Tensor}
_MASK = {_aten.masked_fill.Scalar: _aten.masked_fill_.Scalar}

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
            "ClampBackward",
            "ClampMaxBackward",
            "ClampMinBackward",
            "FmaxBackward",
            "FminBackward",
            "MaximumBackward",
            "MinimumBackward",
        ),
        _MASK,
    ),
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

From ``torch/csrc/autograd/FunctionsManual.cpp``, ``tools/autograd/derivatives.yaml`` and
``ATen/native``; the first argument is what is written to, where the formula has made it.
"""

_OTHERS = {
    "LinalgHouseholderProductBackward": _aten.cat.default,
    "MaskedFillBackward": _aten.where.self,
    "MaxBackward": _aten.logical_and.default,
    "MedianBackward": _aten.logical_and.default,
    "MinBackward": _aten.logical_and.default,
    "NanmedianBackward": _aten.logical_and.default,
    "OrmqrBackward": _aten.cat.default,
    "ProdBackward": _aten.cumprod.default,
}
"""By the node: an op of the formula that torch has for it under a mode alone. Its numbers are those
of the other one but for rounding, or lie in another order."""

_PRODUCT = "ProdBackward"

_ORDERED = frozenset({"MaxBackward", "MedianBackward", "MinBackward", "NanmedianBackward"})
"""The same numbers in the same order, where what they read lies in order."""


class ProductGradient:
    """The gradient of a product as without a mode: the product, divided by each factor.

    Under a mode, and where a factor is zero, torch multiplies the products of the factors before
    each one and after it instead.
    """

    def __init__(self) -> None:
        """The node is about to run."""
        self._factors: tuple[Tensor, int] | None = None

    def instead(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The op to run, and its arguments.

        Args:
            func: The op of the formula for a mode.
            args: Its arguments.
        """
        if func is _aten.slice.Tensor and self._factors is None:
            self._factors = args[0], args[1]  # the first that it makes a part of
        if func is not _aten.mul.Tensor or self._factors is None:
            return func, args
        (factors, dim), self._factors = self._factors, None
        if isinstance(factors, FakeTensor) or bool((factors == 0).any()):
            return func, args
        return _aten.div.Tensor, (factors.prod(dim, keepdim=True), factors)


class Formulas:
    """The formula of autograd that runs, and what it has made so far.

    What a hook or a checkpoint computes while a node runs is the script's, not the formula's.

    Attributes:
        others: Names of nodes that have run by another formula than without a mode.
    """

    def __init__(self, sums: GradientSums | None = None) -> None:
        """Know of none.

        Args:
            sums: Tells the sums of gradients to do in place; ``None`` to leave them as they are.
        """
        self.others: dict[str, None] = {}
        self._sums = sums
        self._node: int | None = None
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._is_own = False
        self._of_product: ProductGradient | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op as torch does without a mode; to be called in ``__torch_dispatch__`` itself.

        Args:
            func: The op.
            args: Its arguments.
            kwargs: Those by name.
        """
        node = torch._C._current_autograd_node()
        if node is None or isinstance(node, BackwardCFunction):
            return func(*args, **kwargs)
        func, args = self.instead(node._sequence_nr(), node.name(), func, args)
        out = func(*args, **kwargs)
        self.has_made(out)
        return out

    def instead(
        self, node: int, name: str, func: Any, args: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The op that a formula would run without a mode, and its arguments.

        Args:
            node: Sequence number of its node.
            name: The name of that node; empty for a function of the user's.
            func: The op that runs under a mode.
            args: Its arguments.
        """
        if node != self._node:
            self._node, self._of_product = node, None
            self._made.clear()
        name = name.rstrip("0123456789")
        sums = self._sums if func is SUM else None
        if sums is not None and sums.is_in_place(name, func, args) and is_called_by_engine():
            self._is_own = False
            return IN_PLACE_SUM, args
        is_own = not torch.is_grad_enabled() and (name == _PRODUCT or name in IN_PLACE)
        self._is_own = is_own and is_called_by_engine()
        if name == _PRODUCT and self._is_own:
            if func is _aten.clone.default:
                self.others[name] = None  # the factors lay in another order
            self._of_product = self._of_product or ProductGradient()
            return self._of_product.instead(func, args)
        if func is _OTHERS.get(name) and (name not in _ORDERED or not args[0].is_contiguous()):
            self.others[name] = None
        place = IN_PLACE[name].get(func) if self._is_own else None
        made = self._made.get(id(args[0])) if place is not None else None
        is_made = made is not None and made() is args[0]
        return (place if is_made and _keeps_shape(func, args) else func), args

    def has_made(self, result: Any) -> None:
        """Know what the op returned that was asked about last."""
        if self._is_own and isinstance(result, Tensor):
            self._made[id(result)] = weakref.ref(result)


def is_called_by_engine() -> bool:
    """Whether no Python runs between an engine and the dispatch of an op.

    To be asked in a function that ``__torch_dispatch__`` calls.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code is Formulas.run.__code__
    ):
        frame = frame.f_back
    if frame is None:
        return True  # a thread of the engine's own
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in _ENGINES


def _keeps_shape(func: Any, args: Sequence[Any]) -> bool:
    """Whether a result has the shape of the first argument, to which it is to be written."""
    if func not in _ELEMENTWISE:
        return True
    shape = args[0].shape
    others = [it.shape for it in args[1:] if isinstance(it, Tensor)]
    return all(
        len(other) <= len(shape)
        and all(size in (1, own) for size, own in zip(other[::-1], shape[::-1], strict=False))
        for other in others
    )
