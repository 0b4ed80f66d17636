"""The executor of a plan's ``undo_checkpoints`` action.

Responsible for running the model's own checkpoints as ordinary forwards. Not responsible for
whether that computes the same: the step was captured so only where it does
(:mod:`memfit.capture.record.model_checkpoints`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from memfit.apply.part import Part
from memfit.capture.record.checkpoints import undone


class CheckpointsUndone(Part):
    """Undoes checkpoints."""

    def forward(self) -> AbstractContextManager[None]:
        """What a forward runs inside."""
        return undone()
