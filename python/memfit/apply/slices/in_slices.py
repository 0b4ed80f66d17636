"""The executor of a plan's ``chunk`` action.

Responsible for running one forward with everything in slices that the plan says, and for telling
what did not. Not responsible for how: a loss over many classes is :mod:`memfit.apply.slices.chunk`,
module calls are :mod:`memfit.apply.slices.sliced_calls`, messages along edges
:mod:`memfit.apply.slices.edges`, images and attention :mod:`memfit.apply.slices.strips`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from memfit.apply.part import Part
from memfit.apply.slices.chunk import ChunkedLoss
from memfit.apply.slices.deferred import without_deferred
from memfit.apply.slices.edges import SlicedEdges, with_real_rows
from memfit.apply.slices.sliced_calls import SlicedCalls
from memfit.apply.slices.strips import Strips, materialized
from memfit.errors import UsageError


class InSlices(Part):
    """Carries out a ``chunk`` action on a model.

    Attributes:
        loss: Computes the loss in slices, or logits for those rows alone that are used; ``None``
            where all is computed whole.
        calls: Runs module calls in slices.
        edges: Computes messages along edges in slices; ``None`` where all are computed whole.
        strips: Makes large tensors a strip at a time; ``None`` where all are made whole.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk: Mapping[str, Any],
        *,
        warn: bool = True,
        records: bool = False,
        in_script: bool = False,
    ) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model the plan was made for.
            chunk: ``Chunk`` of the plan as parsed JSON.
            warn: Whether to warn, once each, when something runs whole.
            records: Whether the forward only records, on fake tensors.
            in_script: As of :class:`ChunkedLoss`.

        Raises:
            UsageError: It is no such thing, or names what the model does not have.
        """
        loss, calls = chunk.get("loss"), chunk.get("calls", [])
        head = None if loss else chunk.get("head")
        strips, edges = chunk.get("strips"), chunk.get("edges")
        if not (loss or head or calls or strips or edges):
            raise UsageError("the plan's `chunk` action says nothing of what runs in slices")
        self._chunk = chunk
        self.loss = None
        if logits := loss or head:
            self.loss = ChunkedLoss(
                model, logits, rows_alone=not loss, warn=warn, in_script=in_script
            )
        self.calls = SlicedCalls(model, calls, warn=warn, unseen=in_script)
        self.edges = SlicedEdges(edges, warn=warn) if edges else None
        self.strips = Strips(model, strips, records=records) if strips else None

    @property
    def diverged(self) -> bool:
        """Whether something of the last forward ran whole."""
        return bool(self.divergence)

    @property
    def divergence(self) -> str:
        """What did, as a sentence; empty if nothing did."""
        parts = (self.loss, self.calls, self.edges, self.strips)
        return next((part.divergence for part in parts if part and part.divergence), "")

    @property
    def less(self) -> dict[str, Any] | None:
        """The ``chunk`` without gathers of which the last forward needed all rows.

        ``None`` where it needed none, or something else was not in slices.
        """
        edges = self.edges
        parts = (self.loss, self.calls, self.strips)
        if edges is None or not edges.whole or any(part and part.divergence for part in parts):
            return None
        return {**self._chunk, "edges": {**self._chunk["edges"], "kept": edges.to_be_kept}}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward, the loss included, inside this.

        Raises:
            UsageError: Another forward of this model is inside already.
        """
        with contextlib.ExitStack() as entered:
            for part in (self.loss, self.calls, self.edges, self.strips):
                if part is not None:
                    entered.enter_context(part.forward())
            yield


def as_real(result: Any) -> Any:
    """The result of a forward, with tensors in place of what stands for some.

    Args:
        result: Any pytree.
    """
    return materialized(with_real_rows(without_deferred(result)))
