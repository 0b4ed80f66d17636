"""The executor of a plan's ``chunk`` action.

Responsible for running one forward with everything in slices that the plan says, and for telling
what did not. Not responsible for how: a loss over many classes is :mod:`memfit.apply.slices.chunk`,
module calls are :mod:`memfit.apply.slices.sliced_calls`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from memfit.apply.part import Part
from memfit.apply.slices.chunk import ChunkedLoss
from memfit.apply.slices.sliced_calls import SlicedCalls
from memfit.errors import UsageError


class InSlices(Part):
    """Carries out a ``chunk`` action on a model.

    Attributes:
        loss: Computes the loss in slices, or logits for those rows alone that are used; ``None``
            where all is computed whole.
        calls: Runs module calls in slices.
    """

    def __init__(self, model: nn.Module, chunk: Mapping[str, Any], *, warn: bool = True) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model the plan was made for.
            chunk: ``Chunk`` of the plan as parsed JSON.
            warn: Whether to warn, once each, when something runs whole.

        Raises:
            UsageError: It is no such thing, or names what the model does not have.
        """
        loss, calls = chunk.get("loss"), chunk.get("calls", [])
        head = None if loss else chunk.get("head")
        if not loss and not head and not calls:
            raise UsageError("the plan's `chunk` action says nothing of what runs in slices")
        self.loss = None
        if logits := loss or head:
            self.loss = ChunkedLoss(model, logits, rows_alone=not loss, warn=warn)
        self.calls = SlicedCalls(model, calls, warn=warn)

    @property
    def diverged(self) -> bool:
        """Whether something of the last forward ran whole."""
        return bool(self.divergence)

    @property
    def divergence(self) -> str:
        """What did, as a sentence; empty if nothing did."""
        return (self.loss.divergence if self.loss else "") or self.calls.divergence

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward, the loss included, inside this.

        Raises:
            UsageError: Another forward of this model is inside already.
        """
        with self.loss.forward() if self.loss else contextlib.nullcontext(), self.calls.forward():
            yield
