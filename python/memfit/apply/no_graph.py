"""The executor of a plan's ``no_graph`` action.

Responsible for keeping autograd off while a forward of inference runs that turns it on. Not
responsible for who may lose the graph: the plan is of a step without a backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from memfit.apply.part import Part
from memfit.capture.record.gradient_mode import gradient_mode


class NoGraph(Part):
    """Keeps autograd off."""

    def forward(self) -> AbstractContextManager[None]:
        """What a forward runs inside."""
        return gradient_mode("off")
