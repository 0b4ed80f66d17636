"""Ops that torch computes in another way under a dispatch mode, computed as without one.

Some functions of ATen, and some of autograd's formulas, write in place to a tensor that they have
just made, unless a dispatch mode is on the stack (``isTensorSubclassLike`` in
``ATen/TensorSubclassLikeUtils.h``): then they make another tensor, and for a moment both are there.
A step that is recorded under a mode would take more than the one that runs without it. Responsible
for doing in place under memfit's own modes what torch does in place without them: the numbers are
the same either way. Not responsible for the formulas that a mode replaces by others
(``prod_backward``, ``cumprod_backward``), nor for sums of gradients that meet in the engine.
"""

from __future__ import annotations

import functools
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten = torch.ops.aten
_SCATTER = {_aten.scatter.src: _aten.scatter_.src}

_ELEMENTWISE = {_aten.sub.Tensor, _aten.mul.Tensor}
_MATRIX = 2
LINEAR = functional.linear
"""Torch's own."""

_DEVICES = ("cpu", "cuda")

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


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which ``linear`` adds its bias in place, as without one."""

    def __enter__(self) -> Any:
        """Be on the stack; ``linear`` has a stand-in meanwhile."""
        _STAND_IN.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        """Be on the stack no more."""
        _STAND_IN.end()
        return super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]


class _StandIn:
    """Stands in for ``torch.nn.functional.linear`` while modes of memfit's are on the stack."""

    def __init__(self) -> None:
        self._depth = 0

    def begin(self) -> None:
        if self._depth == 0 and functional.linear is LINEAR:
            _tell_torchscript()
            functional.linear = linear
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0 and functional.linear is linear:
            functional.linear = LINEAR


@functools.cache
def _tell_torchscript() -> None:
    """Have TorchScript take the stand-in for what it stands for."""
    torch.jit._builtins._register_builtin(linear, "aten::linear")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """What ``at::linear`` does without a mode (``ATen/native/Linear.cpp``).

    Its bias is added to a product that is a tensor of its own where the input is neither a matrix
    nor contiguous. Where autocast is on, it casts for the whole.

    Args:
        input: Of shape ``(*, inputs)``.
        weight: Of shape ``(outputs, inputs)``.
        bias: Of shape ``(outputs)``.

    Returns:
        The result, of shape ``(*, outputs)``.
    """
    if (
        bias is None
        or input.dim() <= _MATRIX
        or input.is_contiguous()
        or not torch._C._len_torch_dispatch_stack()
        or torch.compiler.is_compiling()
        or not _is_plain(input, weight, bias)
    ):
        return LINEAR(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether ``at::linear`` itself computes with tensors, and as it does by itself."""
    device = tensors[0].device.type
    return (
        device in _DEVICES
        and all(it.layout is torch.strided for it in tensors)
        and not torch.overrides.has_torch_function(tensors)
        and not torch.is_autocast_enabled(device)
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and os.environ.get("TORCH_LINEAR_FLATTEN_3D") != "1"
    )


_STAND_IN = _StandIn()
