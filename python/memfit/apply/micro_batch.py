"""Micro-batches: one step as several smaller ones whose gradients add up.

Responsible for cutting the batch, and for the weight of each piece, so that loss and gradients
equal those of the whole batch up to rounding. Not responsible for running the pieces
(:mod:`memfit.run.fitted`) or for whether the batch may be cut at all (the engine refuses coupled
ones).

A mean over rows weighs a piece by its rows. A mean over targets that are not ignored weighs it by
those, and their number is known only as the pieces run: a piece's weight is then a fraction of what
the first piece leads one to expect, and the gradients are scaled once, before the last backward, if
the expectation was wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.apply.part import Part
from memfit.apply.proven_ops import LeftProof, Proof, ProvenOps
from memfit.errors import DivergenceWarning, UsageError
from memfit.tensors.function_modes import torchs_own
from memfit.tensors.gradient_hooks import gradient_hooks
from memfit.workload import batch_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

TOKEN_MEAN = "token_mean"  # noqa: S105 - no password
REDUCTIONS = ("", "mean", "sum", TOKEN_MEAN)
"""How a loss reduces over the batch; empty: watch the loss, and else take the mean over rows."""


class MicroBatches(Part):
    """A plan's ``micro_batch`` action.

    Attributes:
        pieces: Pieces of the batch.
        left: Where the last step left the proof that the batch may be cut; empty if it did not.
        results: Of inference: the dimension of items of each tensor that forward returns.
    """

    def __init__(self, pieces: int, ops: Mapping[str, Any] | None, *, warn: bool = True) -> None:
        """Check what the plan says.

        Args:
            pieces: Pieces of the batch.
            ops: ``MicroBatch`` of the plan as parsed JSON; ``None`` to trust whoever wrote the plan
                that the batch may be cut.
            warn: Whether to warn, once, when a step runs whole.

        Raises:
            UsageError: It is no number of pieces, or these are no ops.
        """
        if pieces < 1:
            message = f"the plan cuts the batch into `{pieces}` pieces"
            raise UsageError(message)
        try:
            names = ops["names"] if ops is not None else []
            self.results = [int(dim) for dim in ops.get("results", ())] if ops is not None else []
            self._proof = Proof([names[i] for i in ops["forward"]]) if ops is not None else None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = f"the plan's `micro_batch` action is malformed: {error!r}"
            raise UsageError(message) from error
        self.pieces = pieces
        self.left = ""
        self._warns = warn

    @property
    def diverged(self) -> bool:
        """Whether the last step ran whole."""
        return bool(self.left)

    @property
    def divergence(self) -> str:
        """Why it did, as a sentence; empty if it did not."""
        return self.left

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward of a piece runs inside.

        Raises:
            LeftProof: It runs other ops than those for which the batch may be cut.
        """
        return ProvenOps(self._proof) if self._proof is not None else contextlib.nullcontext()

    def refusal(self, model: nn.Module) -> str | None:
        """Why the next step cannot run in pieces, as far as that is known before it.

        Args:
            model: The model.
        """
        return gradient_hooks(model) if self._proof is not None else None

    def run_whole(self, left: str) -> None:
        """Note that a step runs whole.

        Args:
            left: Where it left the proof.
        """
        self.left = left
        if self._warns:
            self._warns = False
            message = (
                f"the step is not the one that was planned: {left}. Whether its batch may be cut "
                "is not known, so it runs whole. Results stay right; it may take more memory than "
                "planned"
            )
            warnings.warn(message, DivergenceWarning, stacklevel=2)


@dataclass(slots=True, frozen=True)
class Piece:
    """A part of the batch.

    Attributes:
        batch: The part, views of the whole.
        rows: Examples in it.
    """

    batch: Any
    rows: int


def cut(batch: Any, count: int, dim: int, planned: Any = None) -> list[Piece]:
    """Cut a batch into ``count`` pieces of sizes that differ by one at most.

    Args:
        batch: Any pytree of tensors and constants.
        count: Pieces wanted; a batch of fewer examples gives one piece for each.
        dim: The batch dimension.
        planned: The batch that was planned for, whose tensors of one size along ``dim`` are those
            that are cut; ``None`` for ``batch`` itself. A table may have as many rows as another
            batch has examples.

    Raises:
        UsageError: The batch has no examples to divide.
        LeftProof: Its tensors are others than those that were planned for.
    """
    leaves, structure = tree_flatten(batch)
    model, wanted = (leaves, structure) if planned is None else tree_flatten(planned)
    if structure != wanted:
        raise LeftProof("its batch holds other things than the one that was planned for")
    planned_size = batch_size(model, dim)
    if planned_size == 0:
        raise UsageError("the batch has no tensor with a batch dimension, so it cannot be cut")
    are_cut = [_size(leaf, dim) == planned_size for leaf in model]
    sizes = {_size(leaf, dim) for leaf, is_cut in zip(leaves, are_cut, strict=True) if is_cut}
    size = sizes.pop()
    if sizes or not size:
        raise LeftProof("the tensors of its batch are not all of one size")
    bounds = [size * k // min(count, size) for k in range(min(count, size) + 1)]
    return [
        Piece(
            tree_unflatten(
                [
                    leaf.narrow(dim, start, stop - start) if is_cut else leaf
                    for leaf, is_cut in zip(leaves, are_cut, strict=True)
                ],
                structure,
            ),
            stop - start,
        )
        for start, stop in itertools.pairwise(bounds)
    ]


def _size(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim():
        return leaf.shape[dim]
    return None


class Weights:
    """The weight of each piece's loss.

    Use: run the loss of piece ``k`` inside :meth:`observe`, then ask :meth:`of` for its weight, and
    before the last backward :meth:`correction` for what to multiply the earlier gradients by.
    """

    def __init__(
        self, pieces: list[Piece], reduction: str, loss_weight: Callable[[Any], float] | None
    ) -> None:
        """Prepare for these pieces.

        Args:
            pieces: All pieces of the batch.
            reduction: One of :data:`REDUCTIONS`.
            loss_weight: The user's own weight of a piece, in any unit; wins over ``reduction``.
        """
        if reduction not in REDUCTIONS:
            message = f"unknown loss reduction `{reduction}`: one of {REDUCTIONS[1:]}"
            raise UsageError(message)
        self._pieces = pieces
        self._counted: list[tuple[float, ...]] = []
        self._observes = loss_weight is None and reduction in {"", TOKEN_MEAN}
        self._sum = loss_weight is None and reduction == "sum"
        self._weights = [float(piece.rows) for piece in pieces]
        if loss_weight is not None:
            self._weights = [float(loss_weight(piece.batch)) for piece in pieces]
        self._total = sum(self._weights)
        if self._total <= 0 and not self._sum:
            raise UsageError("`loss_weight` gives no piece of the batch a positive weight")

    def observe(self) -> CountedTargets:
        """A context in which the loss of the next piece runs."""
        return CountedTargets(self._counted if self._observes else None)

    def of(self, index: int) -> float:
        """Weight of piece ``index``, whose loss has just run; the last one's is exact.

        Raises:
            UsageError: The loss takes several means over different numbers of targets.
        """
        if self._sum:
            return 1.0
        counts = self._targets()
        if counts is None:
            return self._weights[index] / self._total
        return counts[index] / self._denominator(counts[: index + 1])

    def correction(self) -> float:
        """What to multiply the gradients of all pieces but the last by, once the last loss ran."""
        counts = self._targets()
        if self._sum or counts is None or len(counts) == 1:
            return 1.0
        return self._expected(counts) / sum(counts)

    def mean(self, losses: list[Tensor]) -> Tensor:
        """The loss of the whole batch from those of its pieces, after the last has run."""
        total = torch.zeros_like(losses[0])
        for loss, weight in zip(losses, self.shares(), strict=True):
            if weight > 0:  # the mean over no target is no number
                total = total + loss * weight
        return total

    def shares(self) -> list[float]:
        """The weights of all pieces, after the last has run.

        Raises:
            UsageError: As :meth:`of`.
        """
        counts = self._targets()
        if self._sum:
            return [1.0] * len(self._pieces)
        if counts is None:
            return [weight / self._total for weight in self._weights]
        return [count / sum(counts) for count in counts]

    @property
    def counts_targets(self) -> bool:
        """Whether the loss of each piece was seen to take its mean over some targets."""
        return self._targets() is not None

    def _expected(self, counts: list[float]) -> float:
        rows = sum(piece.rows for piece in self._pieces)
        return counts[0] * rows / self._pieces[0].rows if counts[0] > 0 else float(rows)

    def _denominator(self, counts: list[float]) -> float:
        return sum(counts) if len(counts) == len(self._pieces) else self._expected(counts)

    def _targets(self) -> list[float] | None:
        """Targets counted in each piece so far; ``None`` where the loss was not seen to count."""
        if not self._observes or not self._counted or not self._counted[0]:
            return None
        first = self._counted[0]
        for counted in self._counted[1:]:
            if len(counted) != len(first):
                raise UsageError(_SEVERAL_MEANS)
        totals = [sum(counted) for counted in self._counted]
        for k in range(len(first)):
            series = [counted[k] for counted in self._counted]
            if any(a * totals[0] != b * series[0] for a, b in zip(series, totals, strict=True)):
                raise UsageError(_SEVERAL_MEANS)
        return [counted[0] for counted in self._counted]


_SEVERAL_MEANS = (
    "the loss takes means over different numbers of targets, so the weight of a piece of the batch "
    "is not known\nhint: give `loss_weight` in the workload, or forbid `micro_batch`"
)


class CountedTargets(TorchFunctionMode):
    """While entered, counts the targets that each cross entropy takes its mean over."""

    def __init__(self, pieces: list[tuple[float, ...]] | None) -> None:
        """Create an observer.

        Args:
            pieces: Gets one entry, a count for each mean; ``None`` observes nothing.
        """
        super().__init__()
        self._pieces = pieces
        self._counts: list[float] = []

    def __enter__(self) -> Self:
        """Start counting."""
        if self._pieces is not None:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop counting and hand in the counts."""
        if self._pieces is not None:
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            if kind is None:
                self._pieces.append(tuple(self._counts))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``; count the targets if it is a mean over some."""
        kwargs, func = kwargs or {}, torchs_own(func)
        if func in _MEANS:
            count = _count(args, kwargs)
            if count is not None:
                self._counts.append(count)
        return func(*args, **kwargs)


_MEANS = (F.cross_entropy, F.nll_loss)


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """What the mean is divided by; ``None`` when the call takes no mean."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("reduction", "mean") != "mean":
        return None
    target, weight, logits = given["target"], given.get("weight"), given["input"]
    # Not seen by a watch around the loss: these are no ops of the step.
    with torch.no_grad(), _disable_current_modes():
        if target.is_floating_point():
            classes = logits.shape[1] if logits.dim() > 1 else logits.shape[0]
            return float(logits.numel() // classes)
        counted = target != given.get("ignore_index", -100)
        if weight is None:
            return float(counted.sum().item())
        return float(weight[target[counted]].sum().item())
