"""The gradient of what is divided by, with less than half of the memory that torch takes for it.

Torch computes ``-gradient * ((dividend / divisor) / divisor)``, sums that to the shape of the
divisor, and holds each part to the end: of a temperature by which scores are divided these are four
tensors as large as the scores. Each may be written over the one that it comes from, where that is
the formula's own: the same numbers in the same order, and one such tensor. Responsible for that
formula. Not responsible for the gradient of the dividend, which comes after it
(:mod:`memfit.tensors.backward_in_place`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit.tensors.layouts import PLAIN, decides_layout

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an op with arguments by place and by name."""

_aten = torch.ops.aten
_DIV, _NEG, _MUL = _aten.div.Tensor, _aten.neg.default, _aten.mul.Tensor
_ORDER = (_DIV, _DIV, _NEG, _MUL)
NODE = "DivBackward"

_KINDS = (Tensor, nn.Parameter)

_PARTS = 4
"""Tensors that torch makes and holds; one of them is made here."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to run in the place of an op of the formula.

    Attributes:
        compute: Runs it.
        spared_bytes: What the formula takes less, from here on.
        taken_bytes: What it would take as it is.
        is_decided: Whether it belongs to a formula that has begun.
    """

    compute: Callable[[Run], Any]
    spared_bytes: int
    taken_bytes: int
    is_decided: bool

    def run(self, run: Run) -> Any:
        """The result that the formula goes on with.

        Args:
            run: Runs an op.
        """
        return self.compute(run)


class DivisorGradient:
    """Follows the formula through the node that runs."""

    def __init__(self) -> None:
        """No node has run yet."""
        self._is_known = is_as_known()
        self.begins()

    def begins(self) -> None:
        """A backward begins, in which each node runs once."""
        self._node, self._ran = -1, 0
        self._forget()

    def _forget(self) -> None:
        self._quotient: Callable[[], Tensor | None] = _nothing
        self._factor: Callable[[], Tensor | None] = _nothing
        self._is_negated = False

    @property
    def is_over(self) -> bool:
        """Whether the formula has run: what comes next is the dividend's."""
        return self._is_known and self._ran > len(_ORDER)

    def instead(self, node: int, func: Any, args: tuple[Any, ...]) -> Step | None:
        """What to run instead of an op.

        Args:
            node: Number of the node that runs, of a division whose divisor wants a gradient.
            func: The op.
            args: Its arguments.

        Returns:
            ``None`` for one to be run as it is.
        """
        if node != self._node:
            self.begins()
            self._node = node
        number, self._ran = self._ran, self._ran + 1
        if not self._is_known or number >= len(_ORDER) or func is not _ORDER[number]:
            return None
        if number == 0:
            return self._first(args)
        quotient = self._quotient()
        if quotient is None:
            return None
        if func is _DIV:
            is_own = args[0] is quotient
            return self._goes_on(lambda run: run(_aten.div_.Tensor, args, {})) if is_own else None
        return self._negated(quotient, args) if func is _NEG else self._product(quotient, args)

    def _first(self, args: tuple[Any, ...]) -> Step | None:
        """The quotient: the one tensor of the formula."""
        dividend, divisor = args[:2]
        if not all(type(it) in _KINDS and it.device.type == "cpu" for it in args[:2]):
            return None
        if dividend.dtype not in PLAIN or not decides_layout(dividend, divisor):
            return None

        def compute(run: Run) -> Any:
            made = run(_DIV, args, {})
            self._quotient = weakref.ref(made)
            return made

        size = int(dividend.nbytes)
        return Step(compute, (_PARTS - 1) * size, _PARTS * size, is_decided=False)

    def _negated(self, quotient: Tensor, args: tuple[Any, ...]) -> Step | None:
        """The gradient itself, for now: the sign is changed once that is in the quotient."""
        gradient = args[0]
        if gradient.dtype is not quotient.dtype or gradient.shape != quotient.shape:
            return None
        if gradient.stride() == quotient.stride():
            self._factor = weakref.ref(gradient)
            return self._goes_on(lambda _run: gradient)
        if not decides_layout(gradient, quotient):
            return None  # the sum to come reads in the order in which the gradient lies

        def compute(run: Run) -> Any:
            made = run(_NEG, args, {})
            self._factor, self._is_negated = weakref.ref(made), True
            return made

        return self._goes_on(compute)

    def _product(self, quotient: Tensor, args: tuple[Any, ...]) -> Step | None:
        factor, is_negated = self._factor(), self._is_negated
        self._forget()
        if factor is None or factor is not args[0] or quotient is not args[1]:
            return None
        if is_negated:
            return self._goes_on(lambda run: run(_aten.mul_.Tensor, args, {}))

        def compute(run: Run) -> Any:
            product = run(_aten.mul_.Tensor, (quotient, factor), {})
            return run(_aten.neg_.default, (product,), {})

        return self._goes_on(compute)

    @staticmethod
    def _goes_on(compute: Callable[[Run], Any]) -> Step:
        return Step(compute, 0, 0, is_decided=True)


def _nothing() -> None:
    return None


class _Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the ops of divisions' nodes with what they read and make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, tuple[Any, ...], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        if node is not None and node.name().startswith(NODE) and func is not _aten.detach.default:
            self.ops.append((func, args, out))
        return out


def is_as_known() -> bool:
    """Whether this torch computes the formula in the order that is known here.

    To be asked first where no op is being dispatched, as that of a gradient's owners.
    """
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
            return _order_is_known()
    except (AttributeError, RuntimeError):  # of a torch that forbids it here
        return False


@cache
def _order_is_known() -> bool:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it)
    with torch._C.DisableTorchFunction(), hooks:
        dividend, divisor = (
            torch.ones(size, device="cpu", dtype=torch.float32, requires_grad=True)
            for size in ((2, 2), ())
        )
        made, leaves = dividend.cos() / divisor, (dividend, divisor)
        ones = torch.ones_like(made)
        engine = torch.autograd.Variable._execution_engine
        with _Listing() as listing:
            engine.run_backward((made,), (ones,), False, False, leaves, False, False)  # noqa: FBT003
    if [func for func, _, _ in listing.ops[:5]] != [*_ORDER, _DIV]:
        return False
    (_, _, quotient), (_, second, whole), (_, given, factor), (_, product, _) = listing.ops[:4]
    _, last, _ = listing.ops[4]
    return (
        second[0] is quotient
        and product[0] is factor
        and product[1] is whole
        and last[0] is given[0]
    )
