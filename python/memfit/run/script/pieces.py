"""The calls of one loop's model on pieces of the batch, where no other plan fits.

Responsible for whether that may be done to a script, for how many pieces are worth a recorded step,
and for what came of each. Not responsible for the proof (:mod:`memfit.plan.items_apart`), for
running a call so (:mod:`memfit.apply.pieces.call`), nor for the plan.

Which ops run is then another matter, so nothing is derived: a step of the script is recorded with
its model at work in pieces, and planned from as any other. The loss gets whole tensors. A first
step whose whole would clearly not fit, even recorded, is recorded in pieces at once.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from memfit.answers import Plan
from memfit.apply.pieces.call import LEAST_ROWS
from memfit.apply.pieces.in_pieces import InPieces
from memfit.capture.record.effects import CallLook
from memfit.plan.call_bytes import CallMixedError, call_bytes
from memfit.plan.items_apart import ItemsApart, ItemsMixedError, items_apart
from memfit.run.script.call_growth import CallGrowth
from memfit.run.script.observed import Observation
from memfit.run.script.plain_code import more_than_computing
from memfit.run.script.planned_step import Key, PlannedStep, elements
from memfit.run.script.request import FitRequest
from memfit.run.script.sizes import kind_of, most_growth
from memfit.tensors.gradient_hooks import own_forwards

MOST_TRIES = 3
"""Numbers of pieces that are recorded for one step."""

MOST_PIECES = 64

MOST_EVALUATIONS = 8
"""Kinds of calls without gradients that are looked at; a model that generates makes many."""

CLEARLY = 0.85
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
        self._is_asked = options.promise != "exact" and "micro_batch" not in options.forbid
        self._was_asked = self._is_asked
        self.evaluations = 0
        self._seen = CallGrowth()
        self._known_code: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._evaluated: dict[Key, _Evaluation] = {}
        self._kinds: dict[Key, _Kind] = {}
        self._whole_bytes: dict[Key, int | None] = {}
        self._mixed: set[Key] = set()

    def wants(self, key: Key) -> dict[str, Any] | None:
        """The action by which a step is to be recorded; ``None`` for whole.

        Args:
            key: Its key.
        """
        kind = self._kinds.get(kind_of(key))
        if kind is None or self.refusal or kind.count == 1:
            return None
        larger = -(-elements(key) // kind.elements)
        return kind.apart.action(min(kind.count * larger, kind.most))

    def asks_for_more(self, key: Key) -> bool:
        """Whether a step is to be recorded once more, in pieces or in more of them.

        Args:
            key: Its key.
        """
        kind = self._kinds.get(kind_of(key))
        return kind is not None and kind.asks_for_more and not self.refusal

    def refuse(self, reason: str) -> None:
        """Run nothing in pieces from here on.

        Args:
            reason: Why, as a clause.
        """
        self.refusal = self.refusal or reason

    def notes(self) -> list[str]:
        """Why nothing runs in pieces, where that was asked for."""
        reason = self.refusal if self._was_asked else ""
        return [f"the model does not run on pieces of its batch: {reason}"] if reason else []

    def another_comes(self) -> None:
        """Another model comes in the place of one that is gone."""
        self._evaluated.clear()
        self._seen = CallGrowth()

    def recorded(self, key: Key, observation: Observation) -> None:
        """Know what a step took that was recorded.

        Args:
            key: Its key.
            observation: The recording.
        """
        is_whole = observation.way is None and not observation.may_round
        if self._is_asked and is_whole and observation.device_kind == "cpu":
            self._seen.recorded(key, observation.recorder)

    def begin(
        self, key: Key, model: nn.Module, inputs: Any, live_bytes: int, budget_bytes: int
    ) -> None:
        """A step is about to be recorded: in pieces, if its whole would clearly not fit.

        Args:
            key: Its key.
            model: The model.
            inputs: What it is called with.
            live_bytes: What is there now.
            budget_bytes: The budget; 0 while it is a percentage of a step that has not run.
        """
        others = sorted(own_forwards(model)) if kind_of(key) in self._kinds else []
        if others:  # it came since the model's code was read
            self.refuse(f"`{others[0] or 'the model'}` has a `forward` of its own by now")
        if kind_of(key) in self._kinds or not budget_bytes:
            return
        if self._fits_whole(key, model, inputs, int(CLEARLY * budget_bytes) - live_bytes):
            return
        kind = self._kind(key, model, inputs)
        if kind is None or live_bytes + kind.apart.lean_bytes <= CLEARLY * budget_bytes:
            return
        stays = live_bytes + kind.apart.gradient_bytes
        of_batch = kind.apart.full_bytes - kind.apart.gradient_bytes
        room = int(CLEARLY * budget_bytes) - stays
        if of_batch <= room * kind.most:  # else something else has to go first
            kind.count = min(_pieces(of_batch, room), kind.most)

    def planned(
        self, planned: PlannedStep, made: Plan, pieces: int, key: Key, model: nn.Module, inputs: Any
    ) -> None:
        """A recorded step was planned; have it recorded in another way, if it does not fit.

        Args:
            planned: The step, by the best plan so far.
            made: The plan that follows from the latest recording.
            pieces: Pieces of the batch in that.
            key: The key of the model's next call.
            model: The model.
            inputs: Arguments of that call.
        """
        known = self._kinds.get(kind_of(planned.key))
        if known is not None:
            known.count, known.asks_for_more = planned.step.pieces, False
        if planned.plan.fits or kind_of(key) != kind_of(planned.key):
            return
        kind = self._kind(key, model, inputs)
        if kind is None:
            return
        more = self._more(kind, planned, made, pieces)
        kind.peaks[pieces] = made.planned.predicted_peak_bytes
        if more in kind.peaks:
            # Other plans than pieces may do: parameters elsewhere, for one, go with none.
            more = 1
        if more not in kind.peaks:
            kind.count, kind.elements, kind.asks_for_more = more, elements(planned.key), True

    def _more(self, kind: _Kind, planned: PlannedStep, made: Plan, pieces: int) -> int:
        """How many pieces to try next; as many as now where more would be of no use."""
        peak = made.planned.predicted_peak_bytes
        if _lasting_at_peak(made) > made.budget_bytes:
            more = pieces
        elif pieces == 1:
            stays = planned.step.lasting_bytes() + planned.outside_bytes
            whole = made.unplanned.predicted_peak_bytes
            more = _pieces(whole - stays, made.budget_bytes - stays)
        elif len(kind.peaks) < MOST_TRIES and peak < _FALLS * min(
            kind.peaks.values(), default=2 * peak
        ):
            more = (2 if peak < 2 * made.budget_bytes else 4) * pieces
        else:
            more = pieces
        return min(more, kind.most)

    def evaluation(
        self, key: Key, model: nn.Module, inputs: Any, live_bytes: int, budget_bytes: int
    ) -> AbstractContextManager[None]:
        """What a call without gradients runs inside: in pieces, if its whole would not fit.

        Args:
            key: Its key.
            model: The model.
            inputs: What it is called with.
            live_bytes: What is there now.
            budget_bytes: The budget; 0 while it is a percentage of a step that has not run.
        """
        if not self._may_run_again(model):
            return nullcontext()
        room = int(CLEARLY * budget_bytes) - live_bytes
        added = self._seen.of_evaluation(key)
        if budget_bytes and (added is None or added > room):
            if key not in self._evaluated and len(self._evaluated) == MOST_EVALUATIONS:
                return nullcontext()
            evaluated = self._evaluated.setdefault(key, _Evaluation())
            pieces = evaluated.pieces(model, inputs, room)
            if pieces is not None:
                self.evaluations += 1
                return pieces.forward()
        parameter = next(model.parameters(), None)
        return nullcontext() if parameter is None else self._seen.evaluation(key, parameter.device)

    def _fits_whole(self, key: Key, model: nn.Module, inputs: Any, room: int) -> bool:
        """Whether a step fits while it is recorded, as far as can be told without a recording."""
        is_mixed = kind_of(key) in self._mixed
        if self.refusal or is_mixed or not self._may_run_again(model):
            return True  # it has to
        added = self._seen.of_step(key)
        if added is not None and added + _gradient_bytes(model) <= room:
            return True
        alike = ((at, it) for at, it in self._whole_bytes.items() if kind_of(at) == kind_of(key))
        if any(it is not None and it * most_growth(at, key) <= room for at, it in alike):
            return True
        if key not in self._whole_bytes:
            try:
                self._whole_bytes[key] = call_bytes(model, *inputs)
            except CallMixedError:
                self._mixed.add(kind_of(key))
                return True
            except ItemsMixedError as reason:
                self.refuse(str(reason))
                return True
        whole = self._whole_bytes[key]
        return whole is not None and whole <= room

    def _kind(self, key: Key, model: nn.Module, inputs: Any) -> _Kind | None:
        """What is known of steps of a kind; ``None`` where they may not be cut."""
        if self.refusal or not self._may_run_again(model):
            return None
        kind = kind_of(key)
        if kind not in self._kinds:
            try:
                apart = items_apart(model, inputs[0], inputs[1], _look)
            except ItemsMixedError as reason:
                self.refuse(str(reason))
                return None
            self._kinds[kind] = _Kind(apart, elements(key))
        return self._kinds[kind]

    def _may_run_again(self, model: nn.Module) -> bool:
        """Whether it is allowed, and the model's code does no harm when it runs more often."""
        if self._is_asked and model not in self._known_code:
            self._known_code.add(model)
            if reason := more_than_computing(model):
                self._is_asked = False
                self.refuse(reason)
        return self._is_asked


@dataclass(slots=True)
class _Kind:
    """Steps that differ in their sizes alone.

    Attributes:
        apart: How their call may run in pieces.
        elements: Elements of the inputs for which ``count`` was found.
        count: Pieces in which they are recorded; 1 for whole.
        asks_for_more: Whether one is to be recorded once more.
        peaks: Predicted peaks of what was recorded and did not fit, by pieces.
    """

    apart: ItemsApart
    elements: int
    count: int = 1
    asks_for_more: bool = False
    peaks: dict[int, int] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Pieces at most."""
        return min(self.apart.items // LEAST_ROWS, MOST_PIECES)


@dataclass(slots=True)
class _Evaluation:
    """Calls without gradients of one key; what is free differs from one to the next.

    Attributes:
        whole_bytes: What one takes, as far as fakes tell; 0 before they were asked.
        apart: How one may run in pieces; ``None`` before that was asked.
        has_to_be_whole: Whether it may not.
        by_count: Those that run in so many.
    """

    whole_bytes: int | None = 0
    apart: ItemsApart | None = None
    has_to_be_whole: bool = False
    by_count: dict[int, InPieces] = field(default_factory=dict)

    def pieces(self, model: nn.Module, inputs: Any, room: int) -> InPieces | None:
        """How one runs in pieces; ``None`` where it fits whole, or has to.

        Args:
            model: The model.
            inputs: What it is called with.
            room: What is free.
        """
        self.has_to_be_whole |= any(it.diverged for it in self.by_count.values())
        if self.has_to_be_whole:
            return None
        try:
            call = self._apart(model, inputs, room)
        except ItemsMixedError:
            self.has_to_be_whole = True
            return None
        if call is None or call.forward_bytes <= room:
            return None
        own = call.forward_bytes - call.result_bytes
        count = min(_pieces(own, room - call.result_bytes), call.items // LEAST_ROWS)
        if count not in self.by_count:
            self.by_count[count] = InPieces(model, count, call.action(count)["micro_batch"])
        return self.by_count[count]

    def _apart(self, model: nn.Module, inputs: Any, room: int) -> ItemsApart | None:
        """How the call may run in pieces; ``None`` where it fits whole.

        Raises:
            ItemsMixedError: It may not.
        """
        if self.whole_bytes == 0:
            self.whole_bytes = call_bytes(model, *inputs)
        if self.whole_bytes is not None and self.whole_bytes <= room:
            return None
        self.apart = self.apart or items_apart(model, inputs[0], inputs[1], _look)
        return self.apart


def _lasting_at_peak(plan: Plan) -> int:
    """Bytes at the moment that stops the peak from going lower, whatever the batch is cut into."""
    moment = plan.bottleneck
    if moment is None:
        return 0
    if moment.phase == "optimizer":
        return plan.planned.predicted_peak_bytes
    of_batch = ("activation", "temporary", "workspace")
    return sum(size for category, size in moment.breakdown if category not in of_batch)


def _gradient_bytes(model: nn.Module) -> int:
    return sum(it.nbytes for it in model.parameters() if it.requires_grad)


def _look(model: nn.Module, inputs: Any) -> Any:
    return CallLook(model, inputs).end


def _pieces(of_batch: int, room: int) -> int:
    """How many pieces bring what belongs to the batch into some room."""
    for count in (2, 4, 8, 16):
        if of_batch <= room * count:
            return count
    return 32
