"""The loss of one loop, and its wide layers, in slices of rows, where no other plan fits.

Logits over many classes are often the largest tensor of a language model, and are there three
times: as they are, as logarithms of probabilities, and as their gradient. In slices they never
exist whole. Responsible for whether that may be done to a script, for having a step recorded so,
and for whether it stays. Not responsible for the action (:mod:`memfit.apply.slices.in_slices`), for
what is worth it (the engine's ``plan/technique/chunk``), nor for the plan.

Which ops run is then another matter, so nothing is derived: a step of the script is recorded with
its loss in slices, and planned from as any other. A first step whose whole logits would not fit,
even recorded, is recorded in slices at once, if they are those of the widest linear layer. A script
that looks at its logits gets them whole, and its steps are recorded as they are from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn

from memfit.apply.slices.chunk import ChunkedLoss
from memfit.run.script.observed import Observation
from memfit.run.script.planned_step import PlannedStep
from memfit.run.script.request import FitRequest
from memfit.run.script.step_updates import live_bytes

KIND = "chunk"
"""The kind of the action."""

_SLICES = (32, 8)
"""Slice counts of a first step, as the engine's ``candidates.rs`` has them."""

_LEAST_ROWS = 16
"""Fewer rows in a slice are not worth its ops."""

_COPIES = 3
"""How often whole logits are there: as they are, as logarithms, and as their gradient; in 32 bits,
which a loss is often computed in."""

Inside: TypeAlias = AbstractContextManager[None]


class InSlicesOfRows:
    """What is known of one loop's steps in slices.

    Attributes:
        asks: Whether a step is to be recorded once more, in slices or in another number of them.
        begins_again: Whether that is to be recorded as a first step is.
        refusal: Why none runs so although it was allowed; empty while one may.
    """

    def __init__(self, request: FitRequest) -> None:
        """Know what is allowed.

        Args:
            request: Which plans are.
        """
        options = request.options
        self._may = options.promise != "exact" and KIND not in options.forbid
        self._untried: list[dict[str, Any]] | None = None
        self._tried: dict[str, Any] | None = None
        self._used: dict[str, Any] | None = None
        self._first: _First | None = None
        self.asks = self.begins_again = self._has_begun_again = False
        self.refusal = ""

    def wants(self) -> dict[str, Any] | None:
        """The action by which the step that begins is recorded; ``None`` for whole."""
        return self._tried if self.asks else self._used

    def first(self, model: nn.Module, device: torch.device, budget_bytes: int) -> Inside:
        """What a step runs inside that is recorded as it is: in slices, where it lacks room.

        Args:
            model: The model.
            device: Where it is.
            budget_bytes: The budget; 0 where it is a part of a step that nobody knows yet.
        """
        self._first = None
        name = widest_layer(model) if self._may and budget_bytes and not self.refusal else ""
        if not name:
            return nullcontext()
        self._first = _First(model, name, lambda: budget_bytes - live_bytes(device))
        return self._first.loss.forward()

    def first_ended(self, observation: Observation) -> bool:
        """Learn how that step ran.

        Args:
            observation: Its recording, which is told of the action by which it ran.

        Returns:
            Whether it can be planned from: not where its logits were made whole, too.
        """
        first, self._first = self._first, None
        if first is None or not first.loss.last.losses:
            return True
        if first.loss.last.whole:
            self.refuse(first.loss.divergence)
            return False
        observation.way = self._used = _action({"loss": first.said})
        return True

    def notes(self) -> list[str]:
        """Why nothing runs in slices, where that might have helped."""
        return [f"the loss is not computed in slices: {self.refusal}"] if self.refusal else []

    def consider(self, planned: PlannedStep) -> bool:
        """A step was planned; have it recorded in slices, if it does not fit.

        Args:
            planned: The step, by the best plan so far.

        Returns:
            Whether it is to be.
        """
        if not self._may or self.refusal or planned.plan.fits:
            return False
        if self._untried is None and planned.step.way is None:
            self._untried = _worth_a_step(planned.step.ways())
        if self._untried and not self.asks:
            self._tried, self.asks = _action(self._untried.pop(0)), True
        return self.asks

    def begin_again(self, planned: PlannedStep, model: nn.Module) -> None:
        """Have a step recorded as a first one, which ran on pieces of its batch and does not fit.

        Args:
            planned: The step, by the best plan so far.
            model: What is called in it.
        """
        may = self._may and not (self.refusal or self._has_begun_again or planned.plan.fits)
        if may and planned.step.pieces > 1 and widest_layer(model):
            self.asks = self.begins_again = self._has_begun_again = True
            self._tried = None

    def planned(self, *, nearer: bool) -> None:
        """A step in slices was planned.

        Args:
            nearer: Whether that comes nearer to the budget than before.
        """
        if nearer and not self.begins_again:
            self._used = self._tried
        elif self.begins_again and not nearer:
            self._used = None
        self.asks = self.begins_again = False

    def refuse(self, reason: str) -> None:
        """Compute nothing in slices from here on.

        Args:
            reason: Why, as a clause.
        """
        self.asks, self._used, self._untried = False, None, []
        self.begins_again = False
        self.refusal = self.refusal or reason


class _First:
    """A step recorded in slices if whole logits lack room.

    Attributes:
        said: What the plan's action says of it.
        loss: Computes the loss of a named layer in slices.
    """

    def __init__(self, model: nn.Module, name: str, room: Callable[[], int]) -> None:
        self.said: dict[str, Any] = {"weight": name, "slices": 1}
        self._room = room
        self.loss = ChunkedLoss(model, self.said, warn=False, slices_of=self._slices_of, twice=True)

    def _slices_of(self, rows: int, size_bytes: int) -> int | None:
        classes = self.loss.classes
        taken = max(size_bytes, rows * classes * torch.float32.itemsize) * _COPIES
        slices = next((it for it in _SLICES if rows // it >= _LEAST_ROWS), 0)
        if not slices or taken <= self._room():
            return None
        self.said |= {
            "slices": slices,
            "rows": rows,
            "classes": classes,
            "logit_bytes": size_bytes,
        }
        return slices


def widest_layer(model: nn.Module) -> str:
    """The weight of the linear layer with most features, which may make logits; empty without one.

    Args:
        model: The model.
    """
    layers = [(it.out_features, path) for path, it in model.named_modules() if _widens(it)]
    return f"{max(layers)[1]}.weight".lstrip(".") if layers else ""


def _widens(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.out_features > module.in_features


def _worth_a_step(ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is recorded, in this order: the loss in most slices, and wide layers with it.

    A layer that draws random numbers would draw others for each slice.

    Args:
        ways: The ways that are worth a capture, from the least in slices to the most.
    """
    chunks = [way[KIND] for way in ways if way.keys() == {KIND}]
    losses = [it for it in chunks if not it.get("calls")]
    wide = [
        {**it, "calls": calls}
        for it in chunks
        if (calls := [call for call in it.get("calls", ()) if not call["draws"]])
    ]
    return [*losses[-1:], *wide[-1:]]


def _action(chunk: dict[str, Any]) -> dict[str, Any]:
    loss, calls = chunk.get("loss"), chunk.get("calls", ())
    count = max([*([loss["slices"]] if loss else []), *(call["slices"] for call in calls)])
    return {"kind": KIND, "promise": "equivalent", "count": count, "bytes": 0, KIND: chunk}
