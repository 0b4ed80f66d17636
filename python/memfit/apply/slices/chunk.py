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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.apply.slices.deferred import DeferredLogits
from memfit.apply.slices.forward_mode import ForwardMode
from memfit.apply.slices.weight_copies import Linear
from memfit.apply.slices.whole_logits import Whole
from memfit.apply.slices.writes import make_what_is_written
from memfit.errors import DivergenceWarning, UsageError
from memfit.tensors.function_modes import torchs_own

SlicesOf = Callable[[int, int], int | None]
"""Into how many slices to cut so many rows of logits, of so many bytes: 0 for rows alone that are
used, ``None`` to compute them whole at once."""


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
        slices_of: SlicesOf | None = None,
        in_script: bool = False,
    ) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model the plan was made for.
            chunk: ``LossChunk`` of the plan as parsed JSON; its ``Head`` for rows alone.
            rows_alone: Whether there is no loss, and who looks at some rows of the logits gets no
                others.
            warn: Whether to warn, once, when logits are needed whole.
            slices_of: Into how many slices to cut logits, instead of what ``chunk`` says.
            in_script: Whether it runs in a script, which may differentiate gradients (that costs
                the head's input) and look at logits after updates (:func:`keep_weights` is to be
                called before them).

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
        count = 0 if rows_alone else slices
        self._slices_of = slices_of or (lambda _rows, _bytes: count)
        weight = _parameter(model, name)
        if weight is None:
            message = f"the plan computes the loss over `{name}`, which the model does not have"
            raise UsageError(message)
        self._weight = weight
        self.last = Sliced()
        self._in_script = in_script
        self._warns = warn
        self._running = False

    @property
    def classes(self) -> int:
        """How many the logits are over."""
        return len(self._weight)

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
    def forward(self, *, watches: bool = False) -> Iterator[None]:
        """Run one forward, the loss included, inside this.

        Args:
            watches: Whether to go on watching for writes to what logits are made of, after the
                forward and for as long as there are such.

        Raises:
            UsageError: Another forward of this model is inside already.
        """
        if self._running:
            raise UsageError("a chunked forward is already running: they do not nest")
        self.last = seen = Sliced()
        self._running = True
        try:
            deferring = _Deferring(self._weight, self._slices_of, self._whole_of(seen))
            with deferring.entered(watches=watches):
                yield
        finally:
            self._running = False

    def _whole_of(self, seen: Sliced) -> Callable[[Linear, int], Whole]:
        """Makes what stands for the logits of a call, in so many slices."""

        def sliced(_name: str) -> None:
            seen.losses += 1

        return lambda linear, slices: Whole(
            linear, slices, sliced, self._needed_whole, in_script=self._in_script
        )

    def _needed_whole(self, who: str) -> None:
        self.last.whole.append(who)
        if self._warns:
            self._warns = False
            message = (
                f"`{who}` needs the whole logits, which the plan computes in slices. Results stay "
                "right; the step may take more memory than planned"
            )
            warnings.warn(message, DivergenceWarning, stacklevel=2)


def _parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter by its name; one that is computed, as a spectral norm does, is not had again."""
    path, _, own = name.rpartition(".")
    try:
        return model.get_submodule(path)._parameters.get(own)
    except AttributeError:
        return None


class _Deferring(ForwardMode):
    """While entered, puts off what a weight is applied to."""

    def __init__(
        self, weight: Tensor, slices_of: SlicesOf, whole_of: Callable[[Linear, int], Whole]
    ) -> None:
        super().__init__()
        self._weight = weight
        self._slices_of = slices_of
        self._whole_of = whole_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, or stand in for its result."""
        kwargs, func = kwargs or {}, torchs_own(func)
        make_what_is_written(func, args, kwargs)
        linear = None if self.is_over else self._linear(func, args, kwargs)
        if linear is None:
            return func(*args, **kwargs)
        hidden = linear[0]
        rows = hidden.numel() // max(hidden.shape[-1], 1)
        slices = self._slices_of(rows, rows * len(self._weight) * hidden.element_size())
        if slices is None:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return DeferredLogits.put_off(self._whole_of(linear, slices), hidden, len(self._weight))

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Linear | None:
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


_PLAIN = frozenset({Tensor, nn.Parameter})
_PRODUCTS = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
