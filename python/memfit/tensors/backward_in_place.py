"""Ops of backward whose result may lie where the gradient lies that they read.

A node of autograd reads the gradient of its output, makes that of its input, and both are there for
a moment: at the peak of a backward these are often its two largest tensors. Where nothing else has
the first one, an op that computes element by element, or row by row, may write over it: the same
numbers, and one tensor less. Responsible for which ops those are, and for telling that nothing else
has the gradient. Not responsible for when that is worth it (:mod:`memfit.run.script.lean_backward`)
nor for what torch does in place itself (:mod:`memfit.tensors.as_without_modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memfit.tensors import convolution_in_two, divisor_gradient, gradient_sums
from memfit.tensors.as_without_modes import is_called_by_engine
from memfit.tensors.convolution_in_two import InTwo, in_two
from memfit.tensors.convolution_kinds import BACKWARD
from memfit.tensors.divisor_gradient import DivisorGradient, Run, Step
from memfit.tensors.gradient_sums import GradientSums, Owners, counted, owners
from memfit.tensors.layouts import PLAIN

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Way:
    """An op that does in place what another one does.

    Attributes:
        op: It.
        target: The argument by which it is told where to write; empty where that is its first.
    """

    op: Any
    target: str = ""


@dataclass(frozen=True, slots=True)
class InPlace:
    """What to run in the place of an op of backward.

    Attributes:
        way: The op.
        args: Arguments of the one that it replaces.
        kwargs: Likewise.
        copies: Whether it writes over a copy in order, which the other one would make inside too.
    """

    way: _Way
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    copies: bool
    is_decided = False

    @property
    def spared_bytes(self) -> int:
        """As much as its result, which is as large as the gradient."""
        return int(self.args[0].nbytes)

    @property
    def taken_bytes(self) -> int:
        """What it would take as it is."""
        return 2 * self.spared_bytes if self.copies else self.spared_bytes

    def run(self, run: Run) -> Any:
        """The same result.

        Args:
            run: Runs an op.
        """
        gradient, *others = self.args
        if self.copies:
            gradient = run(_CLONE, (gradient,), {"memory_format": torch.contiguous_format})
        target = {self.way.target: gradient} if self.way.target else {}
        return run(self.way.op, (gradient, *others), {**self.kwargs, **target})


_CLONE = _aten.clone.default

_NAMES = {
    "EluBackward": "elu_backward",
    "GeluBackward": "gelu_backward",
    "HardtanhBackward": "hardtanh_backward",
    "LeakyReluBackward": "leaky_relu_backward",
    "ReluBackward": "threshold_backward",
    "SigmoidBackward": "sigmoid_backward",
    "SiluBackward": "silu_backward",
    "SoftplusBackward": "softplus_backward",
    "TanhBackward": "tanh_backward",
}
_ACTIVATIONS = {
    node: (getattr(_aten, name).default, _Way(getattr(_aten, name).grad_input, "grad_input"))
    for node, name in _NAMES.items()
}
_ARITHMETIC: dict[str, tuple[Any, _Way]] = {
    "DivBackward": (_aten.div.Tensor, _Way(_aten.div_.Tensor)),
    "ExpBackward": (_aten.mul.Tensor, _Way(_aten.mul_.Tensor)),
    "LogBackward": (_aten.div.Tensor, _Way(_aten.div_.Tensor)),
    "MaskedFillBackward": (_aten.masked_fill.Scalar, _Way(_aten.masked_fill_.Scalar)),
    "MulBackward": (_aten.mul.Tensor, _Way(_aten.mul_.Tensor)),
    "NegBackward": (_aten.neg.default, _Way(_aten.neg_.default)),
    "SqrtBackward": (_aten.div.Tensor, _Way(_aten.div_.Tensor)),
}
_OF_ROWS: dict[str, tuple[Any, _Way]] = {
    "LogSoftmaxBackward": (
        _aten._log_softmax_backward_data.default,
        _Way(_aten._log_softmax_backward_data.out, "out"),
    ),
    "SoftmaxBackward": (
        _aten._softmax_backward_data.default,
        _Way(_aten._softmax_backward_data.out, "grad_input"),
    ),
}
WAYS = {**_ACTIVATIONS, **_ARITHMETIC, **_OF_ROWS}
"""By the node of autograd, without its number: the op of its formula that reads the gradient last,
and its way in place. From ``tools/autograd/derivatives.yaml``."""

_ADD = gradient_sums.SUM
_OPS = frozenset((_ADD, BACKWARD, *(op for op, _ in WAYS.values())))
_DIVIDEND = "the gradient of a dividend, after the divisor's"
_FOR_BOTH = "MulBackward"
"""Of two inputs that want a gradient, the one of the second is computed last."""

_FOR_FIRST = ("MaskedFillBackward",)
"""Their op reads the gradient, and is the last to, where only the first input wants one."""

Lean = InPlace | InTwo | Step
"""What to run in the place of an op of backward, and takes less."""


class BackwardInPlace:
    """Tells which op of the node that runs may write over the gradient that it reads."""

    def __init__(self) -> None:
        """No node has run yet."""
        self._alone = alone()
        self._sums = GradientSums()
        self._may_split = convolution_in_two.is_ready()
        self._half = -1
        self._of_divisor = DivisorGradient()

    def begins(self) -> None:
        """A backward begins, in which each node runs once."""
        self._half = -1
        self._of_divisor.begins()

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lean | None:
        """What takes less instead; to be asked in ``__torch_dispatch__`` itself.

        Args:
            func: The op that is about to run.
            args: Its arguments, which nothing else has: the tuple that torch has handed over.
            kwargs: Those by name.

        Returns:
            What to run instead; ``None`` where the op is none, or others may see the gradient.
        """
        if func not in _OPS or torch.is_grad_enabled():
            return None
        node = torch._C._current_autograd_node()
        if node is None or not is_called_by_engine():
            return None
        name = node.name().rstrip("0123456789")
        if func is _ADD:
            if kwargs or not self._sums.is_in_place(name, func, args):
                return None
            return InPlace(_Way(gradient_sums.IN_PLACE), args, kwargs, copies=False)
        if func is BACKWARD:
            is_own = self._may_split and name == convolution_in_two.NODE and not kwargs
            return in_two(node, args) if is_own else None
        step: InPlace | Step | None = None
        if name == divisor_gradient.NODE and _wants(node)[1:] == [True]:
            step = self._of_divisor.instead(node._sequence_nr(), func, args)
        return step or self._last_op(node, name, func, args, kwargs)

    def _last_op(
        self, node: Any, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> InPlace | None:
        """The op in place that reads the gradient last."""
        op, way = WAYS.get(name, (None, None))
        if op is not func or way is None or not self._is_last(node, name):
            return None
        if _is_copied(name, args):
            return InPlace(way, args, kwargs, copies=True)
        seen = owners(args[0])
        of_both = name == divisor_gradient.NODE and _wants(node)[1:] == [True]
        known = _DIVIDEND if of_both else name
        if seen not in self._alone.get(known, ()) or not _takes_its_place(name, args, kwargs):
            return None
        return InPlace(way, args, kwargs, copies=False)

    def _is_last(self, node: Any, name: str) -> bool:
        """Whether the op that runs is the last of its node to read the gradient."""
        wanted = _wants(node)
        if name == divisor_gradient.NODE:
            return wanted[0] and (len(wanted) == 1 or not wanted[1] or self._of_divisor.is_over)
        if name in _FOR_FIRST:
            return wanted[0] and not any(wanted[1:])
        if name != _FOR_BOTH or sum(wanted) == 1:
            return True
        number = node._sequence_nr()
        is_second, self._half = number == self._half, number
        return bool(is_second)


def _wants(node: Any) -> list[bool]:
    """Which inputs of a node want a gradient."""
    return [before is not None for before, _ in node.next_functions]


def _is_copied(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an op by rows first copies its gradient in order, as torch does where it is not."""
    if name not in _OF_ROWS:
        return False
    gradient, result, along = args[:3]
    return (
        type(gradient) is Tensor
        and gradient.device.type == "cpu"
        and gradient.dtype in PLAIN
        and gradient.dtype is result.dtype
        and gradient.layout is torch.strided
        and not gradient.is_contiguous()
        and result.is_contiguous()
        and along in (-1, gradient.dim() - 1)
    )


def _takes_its_place(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result would have lain as the gradient does, in a type that is the same."""
    gradient = args[0]
    if type(gradient) is not Tensor or gradient.device.type != "cpu":
        return False
    if gradient.dtype not in PLAIN or gradient.layout is not torch.strided:
        return False
    others = [it for it in (*args[1:], *kwargs.values()) if isinstance(it, Tensor)]
    if not all(_lies_alike(gradient, it) for it in others):
        return False
    if name in _OF_ROWS:
        return gradient.is_contiguous() and args[2] in (-1, gradient.dim() - 1)
    return bool(others) or gradient.is_contiguous() or _is_dense_image(gradient)


def _lies_alike(gradient: Tensor, other: Tensor) -> bool:
    """Whether a result of both lies as the gradient does."""
    if other.dtype is not torch.bool and other.dtype is not gradient.dtype:
        return False
    if other.shape == gradient.shape and other.stride() == gradient.stride():
        return gradient.is_contiguous() or _is_dense_image(gradient)
    if not gradient.is_contiguous() or other.dim() > gradient.dim():
        return False
    # One that is the same along some dimensions leaves it to the gradient how the result lies.
    sizes = zip(other.shape[::-1], gradient.shape[::-1], strict=False)
    return other.numel() < gradient.numel() and all(size in (1, own) for size, own in sizes)


def _is_dense_image(tensor: Tensor) -> bool:
    images = 4
    return tensor.dim() == images and tensor.is_contiguous(memory_format=torch.channels_last)


_EXAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "DivBackward": lambda x: x / 3.0,
    "EluBackward": functional.elu,
    "ExpBackward": torch.exp,
    "GeluBackward": functional.gelu,
    "HardtanhBackward": functional.hardtanh,
    "LeakyReluBackward": functional.leaky_relu,
    "LogBackward": torch.log,
    "LogSoftmaxBackward": lambda x: functional.log_softmax(x, -1),
    "MaskedFillBackward": lambda x: x.masked_fill(x < 0.0, 0.0),
    "MulBackward": lambda x: x * 3.0,
    "NegBackward": torch.neg,
    "ReluBackward": functional.relu,
    "SigmoidBackward": torch.sigmoid,
    "SiluBackward": functional.silu,
    "SoftmaxBackward": lambda x: functional.softmax(x, -1),
    "SoftplusBackward": functional.softplus,
    "SqrtBackward": torch.sqrt,
    "TanhBackward": torch.tanh,
}


def _flat(example: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return example(x).view(-1)


def _wanted(x: Tensor) -> Tensor:
    return torch.ones((), device=x.device, requires_grad=True)


_COUNTED: dict[str, tuple[str, Any, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    **{
        name: (name, WAYS[name][0], example, partial(_flat, example))
        for name, example in _EXAMPLES.items()
    },
    _DIVIDEND: (
        "DivBackward",
        _aten.div.Tensor,
        lambda x: x / _wanted(x),
        partial(_flat, lambda x: x / _wanted(x)),
    ),
}
"""Where owners are counted: the node, the op, and what makes it run last: with a tensor and with a
view."""


def alone() -> dict[str, tuple[Owners, ...]]:
    """What :func:`owners` counts for a gradient that only the node has that runs, by its name.

    Torch tells: its engine counts owners too, before it takes a gradient for a parameter's own.
    Each op is called in a way of its own, with a tensor or with a view that alone has its base. To
    be asked first where no op is being dispatched; where torch cannot tell, as under a transform of
    functions, nothing is known.
    """
    try:
        return _counted()
    except (AttributeError, RuntimeError):  # of a torch that counts otherwise, or forbids hooks
        return {}


@cache
def _counted() -> dict[str, tuple[Owners, ...]]:
    return {
        name: tuple(counted(node, op, example) for example in examples)
        for name, (node, op, *examples) in _COUNTED.items()
    }
