"""The ways of running one loop's steps in other ops than the script's, where no plan of those fits.

In slices, under autocast, or on pieces of the batch: which ops run is then another matter, so a
step is recorded in the way, and planned from as any other. Responsible for which way a step is
recorded in, and for what comes of it. Not responsible for what each way needs
(:mod:`memfit.run.script.slices`, :mod:`memfit.run.script.casting`,
:mod:`memfit.run.script.pieces`) nor for the plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.run.script.casting import Casting
from memfit.run.script.pieces import PiecesOfBatch
from memfit.run.script.slices import KIND as SLICES
from memfit.run.script.slices import Inside, InSlicesOfRows

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memfit.answers import Plan
    from memfit.run.script.observed import Observation
    from memfit.run.script.planned_step import Call, Key, PlannedStep
    from memfit.run.script.recorded_step import RecordedStep
    from memfit.run.script.request import FitRequest

_AUTOCAST = "autocast"
PIECES = "micro_batch"
"""The kind of the action by which a model runs on pieces of its batch."""


class Ways:
    """The ways of one loop's steps.

    Attributes:
        pieces: What is known of calls on pieces of the batch.
    """

    def __init__(self, request: FitRequest, device: torch.device) -> None:
        """Know what is allowed.

        Args:
            request: Which plans are.
            device: Where the model is.
        """
        self._device = device
        self._casting = Casting(request)
        self._slices = InSlicesOfRows(request)
        self.pieces = PiecesOfBatch(request)

    def wanted(self, key: Key) -> dict[str, Any] | None:
        """The action by which a step is to be recorded; ``None`` for as it is.

        Args:
            key: Its key.
        """
        cast = self._casting.wants(self._device)
        pieces = None if self._slices.begins_again else self.pieces.wants(key)
        return cast or pieces or self._slices.wants()

    @property
    def begins_again(self) -> bool:
        """Whether a step is to be recorded as a first one is."""
        return self._slices.begins_again

    def are_slices(self, call: Call, budget_bytes: int) -> bool:
        """Whether a step is to run in slices, larger ones as well: so it need not run in pieces.

        Args:
            call: The call that it begins with.
            budget_bytes: As of :meth:`first`.
        """
        what = (call.module, call.inputs, self._device, budget_bytes)
        return self._slices.wants() is not None or self._slices.comes_first(*what)

    def asks_for_more(self, key: Key) -> bool:
        """Whether a step is to be recorded once more, in another way.

        Args:
            key: Its key.
        """
        return self._casting.asks or self._slices.asks or self.pieces.asks_for_more(key)

    def first(self, model: nn.Module, budget_bytes: int) -> Inside:
        """What a first step runs inside that is recorded as it is.

        Args:
            model: The model.
            budget_bytes: The budget; 0 while it is a percentage of a step that has not run.
        """
        return self._slices.first(model, self._device, budget_bytes)

    def recorded(self, observation: Observation) -> bool:
        """Learn how a step ran; whether it can be planned from.

        Args:
            observation: Its recording, which is told of a way that came of :meth:`first`.
        """
        if not self._slices.first_ended(observation):
            return False
        kind = action_kind(observation.way)
        if observation.effect and kind == SLICES:
            self._slices.ran_whole(observation.effect, observation.less)
        elif observation.effect:
            self.pieces.refuse(observation.effect)
        return not observation.effect or kind not in (PIECES, SLICES)

    def planned(self, step: RecordedStep, *, nearer: bool) -> bool:
        """A step was planned once more, recorded in a way; whether that is how it runs now.

        Args:
            step: The step.
            nearer: Whether its plan comes nearer to the budget than the one before.
        """
        kind = action_kind(step.way)
        if kind == _AUTOCAST:
            self._casting.planned(nearer=nearer)
        elif kind == SLICES or self._slices.begins_again:
            self._slices.planned(nearer=nearer)
        has_no_choice = bool(self.pieces.refusal) and kind in ("", PIECES)
        return nearer or has_no_choice

    def impossible(self, call: Call) -> tuple[str, ...]:
        """Kinds of action that are known not to be there for a step.

        Args:
            call: What it begins with.
        """
        if call.is_use:
            return PIECES, SLICES  # of a call, which there is not
        return (PIECES,) if self.pieces.refusal else ()

    def consider(self, planned: PlannedStep, made: Plan, pieces: int, call: Call) -> None:
        """Have a step that does not fit recorded in another way, where one may help.

        What changes least comes first: slices, which take no more time either. A first step that
        ran in pieces, as it would not have fitted whole, says nothing of slices: they come last.

        Args:
            planned: The step, by the best plan so far.
            made: The plan that follows from the latest recording.
            pieces: Pieces of the batch in that.
            call: The call that the next step begins with.
        """
        if self._slices.consider(planned, call.module) or self._casting.consider(
            made, self._device
        ):
            return
        self.pieces.planned(planned, made, pieces, call.key, call.module, call.inputs)
        if not self.pieces.asks_for_more(call.key):
            self._slices.begin_again(planned, call.module)

    def evaluation(self, call: Call, model: nn.Module, live_bytes: int, budget: int) -> Inside:
        """What a call without gradients runs inside.

        Args:
            call: The call.
            model: The model that it is of.
            live_bytes: What is there now.
            budget: In bytes; 0 while it is a percentage of a step that has not run.
        """
        sliced = self._slices.evaluation(model)
        if sliced is not None:
            return sliced
        return self.pieces.evaluation(call.key, call.module, call.inputs, live_bytes, budget)

    def notes(self) -> list[str]:
        """Why a step does not run in a way that was asked for."""
        return [*self._casting.notes(), *self._slices.notes(), *self.pieces.notes()]


def action_kind(way: dict[str, Any] | None) -> str:
    """The kind of the action by which a step ran; empty for none.

    Args:
        way: The action.
    """
    return "" if way is None else str(way["kind"])
