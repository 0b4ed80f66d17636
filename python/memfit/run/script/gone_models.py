"""Models that a script has let go of, and that are in memory until garbage is collected.

A model and its optimizer may hold each other. Responsible for when a collection is worth its time:
it takes a tenth of a second where large libraries are loaded. Not responsible for what memfit holds
of a model (:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.apply.offload.parameters import parameters_elsewhere
from memfit.run.script.step_updates import live_bytes

if TYPE_CHECKING:
    from memfit.run.script.loop import Loop


class GoneModels:
    """What garbage may hold of models."""

    def __init__(self) -> None:
        """Nothing has run."""
        self._uncollected_bytes = 0
        self._has_passed = False

    def pass_begins(self) -> None:
        """A model is used: it may be garbage later."""
        self._has_passed = True

    def collect(self, loops: Sequence[Loop]) -> None:
        """Collect garbage where models may be in it; another one has come.

        Not if nothing has come since the last time, as where each parameter has an optimizer of its
        own.

        Args:
            loops: Of the models.
        """
        if not self._has_passed or _live_bytes(loops) <= self._uncollected_bytes:
            return
        if any(loop.need.is_of_garbage() for loop in loops):
            gc.collect()
            self._uncollected_bytes, self._has_passed = _live_bytes(loops), False


def _live_bytes(loops: Sequence[Loop]) -> int:
    """Bytes live where the loops are, and of parameters that come back to there."""
    live = sum(map(live_bytes, {loop.device for loop in loops}))
    return live + parameters_elsewhere()
