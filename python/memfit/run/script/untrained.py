"""Models that no step trains, called without gradients: a frozen teacher, a reward model.

No plan of a step lowers what their forward takes. Where rounding may differ and it lacks room, it
runs on pieces of its batch. Responsible for which of their calls do. Not responsible for the proof
that the items of a batch are apart, nor for running the pieces (:mod:`memfit.run.script.pieces`).
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from memfit.run.script.contexts import occupied
from memfit.run.script.pieces import PiecesOfBatch
from memfit.run.script.step_updates import live_bytes

if TYPE_CHECKING:
    from torch import nn

    from memfit.run.script.planned_step import Call
    from memfit.run.script.request import FitRequest


class UntrainedModels:
    """The models of a script that no step trains."""

    def __init__(self, request: FitRequest) -> None:
        """Know of none yet.

        Args:
            request: What is allowed.
        """
        self._request = request
        self._pieces: weakref.WeakKeyDictionary[nn.Module, PiecesOfBatch] = (
            weakref.WeakKeyDictionary()
        )
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._count = 0

    def is_new(self, model: nn.Module) -> bool:
        """Whether a model is called for the first time; it is not new from then on.

        Args:
            model: The outermost that is called.
        """
        is_new = model not in self._known
        self._known.add(model)
        return is_new

    def forward(self, call: Call, budget_bytes: int) -> AbstractContextManager[None]:
        """What a call runs inside.

        Args:
            call: The call.
            budget_bytes: The budget; 0 while it is a percentage of a step that has not run.
        """
        parameter = next(call.module.parameters(), None)
        if parameter is None or occupied():
            return nullcontext()
        pieces = self._pieces.setdefault(call.module, PiecesOfBatch(self._request))
        live, before = live_bytes(parameter.device), pieces.evaluations
        inside = pieces.evaluation(call.key, call.module, call.inputs, live, budget_bytes)
        self._count += pieces.evaluations - before
        return inside

    def notes(self) -> list[str]:
        """How many calls ran on pieces."""
        what = "forwards of models that no step trains, on pieces of their batch"
        return [f"{what}: {self._count}"] if self._count else []
