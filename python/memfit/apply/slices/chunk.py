"""The loss of a plan's ``chunk`` action: one over many classes, in slices of rows.

Responsible for the life of one forward: putting off the call of the head's linear layer that the
plan names, and telling when the model needed its logits whole after all. Not responsible for what
deferred logits do (:mod:`memfit.apply.slices.deferred`) nor for the loss
(:mod:`memfit.apply.slices.sliced_loss`).

The head is known by its weight, so it does not matter whether a module or a function applies it, or
whether the weight is tied to another module's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memfit.apply.slices.deferred import DeferredLogits, Whole
from memfit.errors import DivergenceWarning, UsageError


@dataclass(slots=True)
class Sliced:
    """What one forward did.

    Attributes:
        losses: Losses computed in slices.
        whole: Who needed the logits whole, each once.
    """

    losses: int = 0
    whole: list[str] = field(default_factory=list)


class ChunkedLoss:
    """Computes a model's loss in slices.

    Attributes:
        last: What the last forward did.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk: Mapping[str, Any],
        *,
        rows_alone: bool = False,
        warn: bool = True,
    ) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model the plan was made for.
            chunk: ``LossChunk`` of the plan as parsed JSON; its ``Head`` for rows alone.
            rows_alone: Whether there is no loss, and who looks at some rows of the logits gets no
                others.
            warn: Whether to warn, once, when logits are needed whole.

        Raises:
            UsageError: It is no such thing, or names a weight that the model does not have.
        """
        try:
            name, slices = str(chunk["weight"]), 1 if rows_alone else int(chunk["slices"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"the plan's `chunk` action is malformed: {error!r}"
            raise UsageError(message) from error
        if slices < 1:
            message = f"the plan computes the loss in `{slices}` slices"
            raise UsageError(message)
        self._slices = 0 if rows_alone else slices
        try:
            self._weight = model.get_parameter(name)
        except AttributeError as error:
            message = f"the plan computes the loss over `{name}`, which the model does not have"
            raise UsageError(message) from error
        self.last = Sliced()
        self._warns = warn
        self._running = False

    @property
    def diverged(self) -> bool:
        """Whether the last forward needed whole logits."""
        return bool(self.last.whole)

    @property
    def divergence(self) -> str:
        """What needed them, as a sentence; empty if nothing did."""
        if not self.last.whole:
            return ""
        return f"it used the logits whole, in `{self.last.whole[0]}`"

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward, the loss included, inside this.

        Raises:
            UsageError: Another forward of this model is inside already.
        """
        if self._running:
            raise UsageError("a chunked forward is already running: they do not nest")
        self.last = seen = Sliced()
        self._running = True
        try:
            with _PutOff(self._weight, self._slices, seen, self._needed_whole):
                yield
        finally:
            self._running = False

    def _needed_whole(self, who: str) -> None:
        self.last.whole.append(who)
        if self._warns:
            self._warns = False
            message = (
                f"`{who}` needs the whole logits, which the plan computes in slices. Results stay "
                "right; the step may take more memory than planned"
            )
            warnings.warn(message, DivergenceWarning, stacklevel=2)


class _PutOff(TorchFunctionMode):
    """While entered, puts off what a weight is applied to."""

    def __init__(self, weight: Tensor, slices: int, seen: Sliced, whole: Any) -> None:
        super().__init__()
        self._weight = weight
        self._slices = slices
        self._seen = seen
        self._whole = whole

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, or stand in for its result."""
        kwargs = kwargs or {}
        linear = self._linear(func, args, kwargs)
        if linear is None:
            return func(*args, **kwargs)
        hidden = linear[0]
        with torch._C.DisableTorchFunction():
            whole = Whole(linear, self._slices, self._sliced, self._whole)
            return DeferredLogits.put_off(whole, hidden, len(self._weight))

    def _linear(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Input, weight and bias, where a call applies the weight to rows of features."""
        if func is F.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
            hidden, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
            is_head = weight is self._weight
        elif func in _PRODUCTS and len(args) == 2 and not kwargs:  # noqa: PLR2004 - two factors
            hidden, bias = args[0], None
            is_head = self._is_transposed(args[1])
        else:
            return None
        if not isinstance(hidden, Tensor):
            return None
        plain = type(hidden) in _PLAIN or type(hidden).__name__ == "FakeTensor"
        if not is_head or not plain or hidden.dim() < 2:  # noqa: PLR2004 - rows of features
            return None
        return hidden, self._weight, bias

    def _is_transposed(self, factor: Any) -> bool:
        if not isinstance(factor, Tensor) or factor.dim() != 2:  # noqa: PLR2004 - a matrix
            return False
        with torch._C.DisableTorchFunction():
            weight = self._weight
            return factor._base is weight and factor.stride() == weight.stride()[::-1]

    def _sliced(self, _name: str) -> None:
        self._seen.losses += 1


_PLAIN = frozenset({Tensor, nn.Parameter})
_PRODUCTS = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
