"""The calls of one loop's model on pieces of the batch, where no other plan fits.

Responsible for whether that may be done to a script, for how many pieces are worth a recorded step,
and for what came of each. Not responsible for the proof (:mod:`memfit.plan.items_apart`), for
running a call so (:mod:`memfit.apply.pieces.call`), nor for the plan.

Which ops run is then another matter, so nothing is derived: a step of the script is recorded with
its model at work in pieces, and planned from as any other. The loss gets whole tensors. A first
step whose whole would clearly not fit, even recorded, is recorded in pieces at once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from memfit.apply.pieces.call import LEAST_ROWS
from memfit.apply.pieces.in_pieces import InPieces
from memfit.plan.items_apart import ItemsApart, ItemsMixedError, items_apart
from memfit.run.script.effects import CallLook
from memfit.run.script.planned_step import Key, PlannedStep
from memfit.run.script.request import FitRequest

MOST_TRIES = 3
"""Numbers of pieces that are recorded for one step."""

MOST_PIECES = 64

MOST_EVALUATIONS = 8
"""Kinds of calls without gradients that are looked at; a model that generates makes many."""

_CLEARLY = 0.85
"""Part of the budget up to which a step is recorded whole first: ops take scratch memory, and what
is known of a step before it ran says nothing of that."""

_FALLS = 0.98
"""More pieces are worth a step only where the last ones lowered the peak to this part."""


class PiecesOfBatch:
    """What is known of one loop's steps in pieces.

    Attributes:
        refusal: Why none runs so; empty while one may.
        evaluations: Calls without gradients that ran so.
    """

    def __init__(self, request: FitRequest) -> None:
        """Know what is allowed.

        Args:
            request: Which plans are.
        """
        self.refusal = ""
        options = request.options
        self._is_asked = options.allow != "exact" and "micro_batch" not in options.forbid
        self.evaluations = 0
        self._apart: dict[Key, ItemsApart] = {}
        self._evaluated: dict[Key, InPieces | None] = {}
        self._tries: dict[Key, list[int]] = {}
        self._next: dict[Key, int] = {}

    def wants(self, key: Key) -> dict[str, Any] | None:
        """The action by which the next step of this kind is to be recorded; ``None`` for none.

        Args:
            key: Its key.
        """
        count = self._next.get(key)
        return None if count is None else self._apart[key].action(count)

    def refuse(self, reason: str) -> None:
        """Run nothing in pieces from here on.

        Args:
            reason: Why, as a clause.
        """
        self.refusal = self.refusal or reason
        self._next.clear()

    def begin(
        self, key: Key, model: nn.Module, inputs: Any, live_bytes: int, budget_bytes: int
    ) -> None:
        """A step is about to be recorded: in pieces, if its whole would clearly not fit.

        Args:
            key: Its key.
            model: The model.
            inputs: What it is called with.
            live_bytes: What is there now.
            budget_bytes: The budget; 0 where it is a part of a step that nobody knows yet.
        """
        if key in self._tries or not budget_bytes or not self._may_cut(key, model, inputs):
            return
        call = self._apart[key]
        if live_bytes + call.lean_bytes > _CLEARLY * budget_bytes:
            room = int(_CLEARLY * budget_bytes) - live_bytes - call.gradient_bytes
            self._want(key, _pieces(call.full_bytes - call.gradient_bytes, room))

    def planned(self, planned: PlannedStep, model: nn.Module, inputs: Any) -> None:
        """A recorded step was planned; have it recorded in more pieces, if it does not fit.

        Args:
            planned: The step.
            model: The model.
            inputs: Arguments of its next call.
        """
        key, plan = planned.key, planned.plan
        self._next.pop(key, None)
        if plan.fits or not self._may_cut(key, model, inputs):
            return
        peaks = self._tries.setdefault(key, [])
        peak = plan.planned.predicted_peak_bytes
        count = planned.step.pieces
        if count > 1:
            falls = not peaks or peak < _FALLS * peaks[-1]
            if falls and len(peaks) < MOST_TRIES:
                self._want(key, (2 if peak < 2 * plan.budget_bytes else 4) * count)
        elif not peaks:
            stays = planned.step.lasting_bytes() + planned.outside_bytes
            whole = plan.unplanned.predicted_peak_bytes
            self._want(key, _pieces(whole - stays, plan.budget_bytes - stays))
        peaks.append(peak)

    def evaluation(
        self, key: Key, model: nn.Module, inputs: Any, live_bytes: int, budget_bytes: int
    ) -> AbstractContextManager[None]:
        """What a call without gradients runs inside: in pieces, if its whole would not fit.

        Args:
            key: Its key.
            model: The model.
            inputs: What it is called with.
            live_bytes: What is there now.
            budget_bytes: The budget; 0 where nobody knows it yet.
        """
        if not self._is_asked or not budget_bytes:
            return nullcontext()
        if key not in self._evaluated:
            if len(self._evaluated) == MOST_EVALUATIONS:
                return nullcontext()
            self._evaluated[key] = _evaluated(model, inputs, live_bytes, budget_bytes)
        pieces = self._evaluated[key]
        self.evaluations += pieces is not None
        return nullcontext() if pieces is None else pieces.forward()

    def _want(self, key: Key, count: int) -> None:
        most = min(self._apart[key].items // LEAST_ROWS, MOST_PIECES)
        if count > most and key in self._tries and self._tries[key]:
            return
        self._next[key] = min(count, most)

    def _may_cut(self, key: Key, model: nn.Module, inputs: Any) -> bool:
        if not self._is_asked or self.refusal:
            return False
        if key not in self._apart:
            try:
                self._apart[key] = items_apart(model, inputs[0], inputs[1], _look)
            except ItemsMixedError as reason:
                self.refuse(str(reason))
        return not self.refusal


def _evaluated(
    model: nn.Module, inputs: Any, live_bytes: int, budget_bytes: int
) -> InPieces | None:
    """How a call without gradients runs in pieces; ``None`` where it fits whole, or has to."""
    try:
        call = items_apart(model, inputs[0], inputs[1], _look)
    except ItemsMixedError:
        return None
    room = int(_CLEARLY * budget_bytes) - live_bytes
    if call.forward_bytes <= room:
        return None
    own = call.forward_bytes - call.result_bytes
    count = min(_pieces(own, room - call.result_bytes), call.items // LEAST_ROWS)
    return InPieces(model, count, call.action(count)["micro_batch"])


def _look(model: nn.Module, inputs: Any) -> Any:
    return CallLook(model, inputs).end


def _pieces(of_batch: int, room: int) -> int:
    """How many pieces bring what belongs to the batch into some room."""
    for count in (2, 4, 8, 16):
        if of_batch <= room * count:
            return count
    return 32
