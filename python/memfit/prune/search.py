"""The least pruning that is enough.

Responsible for the search over the share of channels that goes. Not responsible for what goes at a
share (:mod:`memfit.prune.groups`) nor for finding what can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from memfit.prune.groups import Removed, elements, kept, removal, tensors_of
from memfit.prune.trial import Separable

_FINEST = 1 / 128
"""Shares are told apart so far where each is a step recorded."""

_FINEST_COUNTED = 1e-5
"""The same where elements are only counted."""


@dataclass(frozen=True, slots=True)
class Found:
    """Channels that go, and what is then left.

    Attributes:
        share: Which part of each group goes.
        removed: For each group, the channels.
        amount: Bytes or elements that are left.
    """

    share: float
    removed: Removed
    amount: int


def least(
    separable: Separable,
    scores: Sequence[Tensor],
    most: int,
    measure: Callable[[Removed], int],
    finest: float,
) -> Found:
    """The smallest share at which no more than so much is left.

    Args:
        separable: What can be pruned.
        scores: For each group, what its channels are worth.
        most: What may be left.
        measure: Says how much is left without some channels.
        finest: Shares closer than this are taken as one.

    Returns:
        The least pruning that was found, or the most there is where that is not enough.
    """
    amounts: dict[Removed, int] = {}

    def at(share: float) -> Found:
        removed = removal(separable.groups, scores, share)
        if removed not in amounts:
            amounts[removed] = measure(removed)
        return Found(share, removed, amounts[removed])

    best = at(1.0)
    if best.amount > most:
        return best
    low, high = 0.0, 1.0
    while high - low > finest:
        middle = at((low + high) / 2)
        if middle.amount <= most:
            best, high = middle, middle.share
        else:
            low = middle.share
    return best


def least_for_elements(separable: Separable, scores: Sequence[Tensor], most: int) -> Found:
    """The least pruning that leaves no more parameters than that; nothing is recorded.

    Args:
        separable: What can be pruned.
        scores: For each group, what its channels are worth.
        most: Elements of parameters that may be left.
    """
    model = separable.workload.model
    shapes = {name: tensor.shape for name, tensor in tensors_of(model).items()}

    def left(removed: Removed) -> int:
        return elements(model, kept(separable.groups, removed, shapes))

    return least(separable, scores, most, left, _FINEST_COUNTED)


def least_for_peak(
    separable: Separable, scores: Sequence[Tensor], most: int, peak: Callable[[Removed], int]
) -> Found:
    """The least pruning whose predicted peak is no more than that.

    Args:
        separable: What can be pruned.
        scores: For each group, what its channels are worth.
        most: Bytes.
        peak: The predicted peak without some channels.
    """
    return least(separable, scores, most, peak, _FINEST)
