"""Gradients in mapped files between steps, where what runs there lacks room.

Once the optimizer has stepped, gradients mostly wait to be dropped, while the script evaluates,
saves, updates other models or runs the next forward. Responsible for when they go, for having those
back that the next backward adds to, and for telling whether optimizer state is to go as well. Not
responsible for the mapping (:mod:`memfit.run.script.held_in_files`), nor for that state
(:mod:`memfit.run.script.loop`).

Nobody knows what runs between steps before it has run. So it is told apart by what begins it, as
each may come at its own times: a step that ends, a call without gradients, the saving of the
optimizer. What each took more than was there tells for the next one; the first is taken to double
what is live. Gradients that went stay where they are until backward, for most scripts drop them
before: whoever reads them meanwhile finds them there, and who writes them has pages of his own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterable
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from memfit import _native
from memfit.apply.offload.mapped import (
    OF_GRADIENT,
    Moves,
    is_lent,
    may_go,
    rows_may_go,
    rows_to_file,
    to_file,
    to_memory,
)
from memfit.apply.offload.parameters import parameters_elsewhere
from memfit.run.script.place import free_bytes, strays_to, takes_files
from memfit.run.script.request import FitRequest
from memfit.run.script.sparse_updates import is_sparse, values_of
from memfit.tensors.storage import gradient_of

GRADIENTS_IN_FILES = "gradients wait in mapped files from the end of a step to the next backward"
"""What is said at the end where that was done."""

STATE_IN_FILES = "optimizer state waits in files between steps, where what runs there lacks room"
"""What is said at the end where that was done."""

Begin = Literal["step", "evaluation", "saving"]
"""What begins a part of the time between steps: the end of one, and what may follow."""

_WORTH = 1 / 64
"""Part of the budget that is worth moving."""


class GradientsBetween:
    """The gradients of models between their steps.

    Attributes:
        is_said: Whether the place was told.
    """

    def __init__(self, request: FitRequest) -> None:
        """Move nothing yet.

        Args:
            request: Where tensors may go.
        """
        self._request = request
        self._is_over = "offload" in request.options.forbid
        self._mapped: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}
        self._took: dict[Begin, int] = {}
        self._now: Begin | None = None
        self._live_bytes = self._elsewhere = self._most_elsewhere = 0
        self._has_sent = self._has_lacked = False
        self._window: _native.AllocationWindow | None = None
        self.is_said = False

    def begins(
        self, what: Begin, budget_bytes: int, models: Iterable[nn.Module], *, least_bytes: int = 0
    ) -> str:
        """A part of the time between steps begins: have gradients in files where it lacks room.

        Args:
            what: What begins it; the end of a step is the first.
            budget_bytes: The budget; 0 where that is not known.
            models: Those that are trained.
            least_bytes: What it is known to take at least.

        Returns:
            Where gradients have gone now; empty where none has.
        """
        if self._is_over or (what != "step" and self._now in (what, None)):
            return ""  # one more of the same, or not between steps
        self._learn()
        live = _native.counted_bytes()
        needed = live + max(self._took.get(what, live), least_bytes)
        self._has_sent = self._has_lacked = False
        place = self._send(budget_bytes, models) if needed > budget_bytes > 0 else ""
        self._goes_on(what, _native.counted_bytes())
        return place

    def lacks_room(self, budget_bytes: int, more_bytes: int = 0) -> bool:
        """Whether what has begun lacks room still, though gradients have gone that may.

        Args:
            budget_bytes: The budget; 0 where that is not known.
            more_bytes: What is about to be in memory.

        Returns:
            Whether that is found now; once for each part.
        """
        if self._is_over or self._now is None or self._has_lacked or not budget_bytes:
            return False
        live = _native.counted_bytes()
        self._has_lacked = live + more_bytes + self._took.get(self._now, live) > budget_bytes
        return self._has_lacked

    def taken_bytes(self) -> int:
        """The most that what has begun has taken so far, above what was live then."""
        return 0 if self._window is None else self._window.peak()[0] - self._live_bytes

    def parameters_went(self) -> None:
        """Parameters may be elsewhere now, in what has begun: they come home before it is over."""
        self._most_elsewhere = max(self._most_elsewhere, parameters_elsewhere())

    def others_went(self, freed_bytes: int) -> None:
        """Something else has gone for what has begun.

        Args:
            freed_bytes: How much.
        """
        now, begun = self._now, self._live_bytes
        if now is not None:
            self._learn()
            self._goes_on(now, begun - freed_bytes)

    def make_room(self, more_bytes: int, budget_bytes: int, models: Iterable[nn.Module]) -> str:
        """Something is about to be in memory: have gradients in files if it lacks room.

        Args:
            more_bytes: How much.
            budget_bytes: The budget; 0 where that is not known.
            models: Those that are trained.

        Returns:
            Where gradients have gone now; empty where none has.
        """
        if self._is_over or self._now is None or self._has_sent:
            return ""
        live = _native.counted_bytes()
        if live + more_bytes + self._took.get(self._now, 0) <= budget_bytes or not budget_bytes:
            return ""
        now, begun = self._now, self._live_bytes
        self._learn()
        place = self._send(budget_bytes, models)
        self._goes_on(now, begun - (live - _native.counted_bytes()))
        return place

    def go(self, budget_bytes: int, models: Iterable[nn.Module], moves: Moves | None = None) -> str:
        """Have gradients in files that are not, for a pass that counts on it.

        Args:
            budget_bytes: The budget.
            models: Those that are trained.
            moves: Told of each before a mapped file is its memory; ``None`` for nobody.

        Returns:
            Where gradients are; empty where none is.
        """
        return "" if self._is_over else self._send(budget_bytes, models, moves)

    def place(self) -> str:
        """Where gradients may go; empty for nowhere."""
        place = "" if self._is_over else strays_to(self._request, "cpu")
        return place if takes_files(place) else ""

    def _goes_on(self, what: Begin, live_bytes: int) -> None:
        """Look from here on what a part takes, above what was live when it began."""
        self._now, self._live_bytes = what, live_bytes
        self._elsewhere = self._most_elsewhere = parameters_elsewhere()
        self._window = _native.AllocationWindow()

    def _learn(self) -> None:
        """Know what the part took that is over, with all parameters that it began with."""
        if self._now is not None and self._window is not None:
            more = self._window.peak()[0] - self._live_bytes
            self.parameters_went()
            more += self._most_elsewhere - self._elsewhere
            self._took[self._now] = max(self._took.get(self._now, 0), more)
        self._now = self._window = None  # each window costs something at each allocation

    def _send(
        self, budget_bytes: int, models: Iterable[nn.Module], moves: Moves | None = None
    ) -> str:
        self._has_sent = True
        place = self.place()
        if not place:
            return ""
        found = [it for model in models for it in model.parameters() if _gradient_may_go(it)]
        found = list(dict.fromkeys(found))
        gradients = [gradient for it in found if (gradient := gradient_of(it)) is not None]
        size = sum(values_of(it).nbytes for it in gradients)
        if not max(budget_bytes * _WORTH, 1) <= size <= free_bytes(place):
            return ""
        try:
            for parameter, gradient in zip(found, gradients, strict=True):
                if is_sparse(parameter):
                    rows_to_file(gradient, place, moves)  # what is added to them makes others
                else:
                    to_file(gradient, place, moves)
                self._mapped[id(parameter)] = weakref.ref(parameter), gradient._version
        except (OSError, RuntimeError):
            self._is_over = True  # the others stay
        return place if self._mapped else ""

    def adopt(self, models: Iterable[nn.Module]) -> bool:
        """Know of gradients that went to files in a recorded step.

        Args:
            models: Those that are trained.

        Returns:
            Whether there are any.
        """
        for parameter in (it for model in models for it in model.parameters()):
            gradient = gradient_of(parameter) if parameter.requires_grad else None
            if gradient is not None and may_go(gradient, is_mapped=True):
                self._mapped[id(parameter)] = weakref.ref(parameter), gradient._version
        return bool(self._mapped)

    def pass_begins(self) -> None:
        """The next pass begins: give memory of its own to what was written meanwhile."""
        self._learn()
        for key, (of, version) in list(self._mapped.items()):
            now = _version(of())
            if now != version:
                del self._mapped[key]
                fetch(of(), None)

    def backward_begins(self, moves: Moves | None, later: Container[int] = ()) -> None:
        """Gradients are about to be added to: have back what is still there.

        Args:
            moves: Told of each before it has other memory; ``None`` for nobody.
            later: The ``id`` of parameters whose gradients are had back one by one.
        """
        for key, (of, _) in list(self._mapped.items()):
            if key not in later:
                del self._mapped[key]
                fetch(of(), moves)


def fetch(parameter: Tensor | None, moves: Moves | None) -> None:
    """Have a gradient in memory again, unless others see where it is now.

    Args:
        parameter: Its parameter; ``None`` where that is gone.
        moves: Told of it before it has other memory; ``None`` for nobody.
    """
    gradient = None if parameter is None else gradient_of(parameter)
    if gradient is None or not may_go(gradient, is_mapped=True) or not _is_unseen(gradient):
        return
    if not is_lent(gradient, OF_GRADIENT):
        to_memory(gradient, moves)


def _version(parameter: nn.Parameter | None) -> int | None:
    """How often a gradient was written; ``None`` where there is none."""
    gradient = None if parameter is None else gradient_of(parameter)
    return None if gradient is None else gradient._version


def _gradient_may_go(parameter: nn.Parameter) -> bool:
    gradient = gradient_of(parameter) if parameter.requires_grad else None
    if gradient is None or is_lent(gradient, OF_GRADIENT):
        return False
    return may_go(gradient) or rows_may_go(gradient)


def _is_unseen(gradient: Tensor) -> bool:
    """Whether no array of numpy, nor anybody else, holds a gradient beside its parameter."""
    return _references(gradient) <= _alone()


def _references(gradient: Tensor) -> int:
    return sys.getrefcount(gradient)


def _through(gradient: Tensor) -> int:
    return _references(gradient)  # through as many frames as in `_is_unseen`


@cache
def _alone() -> int:
    """References to a gradient that one variable of the caller holds, and its parameter."""
    with torch._C._DisableTorchDispatch():  # no op of the script's, which may be recorded
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
    gradient = gradient_of(parameter)
    assert gradient is not None, "it was given one"
    return _through(gradient)
