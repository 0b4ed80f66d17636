"""Gradients written over those that they come from, where a backward lacks room.

Responsible for when that is done: from then on that a recorded backward had no room, or no plan
fits without; and for doing it in planned backwards, as the recorder does in those that it records.
Not responsible for which ops can (:mod:`memfit.tensors.backward_in_place`).

What writes in place takes less wherever it does. A convolution in two calls may take more where its
input stays: the gradient of its weight is there while that of the input is made. So a planned
backward has those in two that its recording had, which is all of a size or none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from memfit.run.script.contexts import entered
from memfit.run.script.lean_ops import LeanWay, least_bytes
from memfit.tensors.as_without_modes import Formulas
from memfit.tensors.backward_in_place import BackwardInPlace, Lean
from memfit.tensors.convolution_in_two import InTwo

IN_PLACE = "large gradients are written over those that they come from"
"""What is said at the end where some were."""

IN_TWO = "large convolutions let go of their input before its gradient is computed"
"""The same of those."""

NONE_IN_TWO = sys.maxsize
"""The size of input from which on convolutions let go of it, in steps in which none does."""


class LeanBackward:
    """The backwards of one loop.

    Attributes:
        way: Whether they write in place.
        ops: Which of their ops can.
        in_two_above: Convolutions with a larger input let go of it; ``None`` where those do that
            lack room, as in a pass that is recorded.
    """

    def __init__(self, budget_bytes: Callable[[], int], notes: dict[str, None]) -> None:
        """None has written in place yet.

        Args:
            budget_bytes: Returns the budget; while that is 0, not known yet, nothing is done.
            notes: Said at the end; of those that did, too.
        """
        self.way = LeanWay()
        self.ops = BackwardInPlace()
        self.in_two_above: int | None = None
        self._in_two = [False, False]
        self._spared_bytes = 0
        self._budget_bytes = budget_bytes
        self._notes = notes

    def may_help(self, lacking_bytes: int) -> bool:
        """Whether a step is to be recorded in place, which has just been planned.

        A peak falls by what one op spares at most, or one formula: what runs there.

        Args:
            lacking_bytes: What it takes above the budget; 0 where it is kept.
        """
        helps = 0 < lacking_bytes <= self._spared_bytes
        self.way.always |= helps
        return helps

    def pass_begins(self) -> None:
        """A pass begins, which is recorded if nothing else is said."""
        self.way.pass_begins()
        self.in_two_above, self._in_two = None, [False, False]

    def is_recorded(self) -> tuple[int, bool]:
        """A recorded step is over: if one op wrote in place, from now on all do.

        A plan for it foresees no more for that than is so.

        Returns:
            Of convolutions, what ``in_two_above`` is to be in a planned one, and whether it is to
            be recorded again because large ones ran in both ways.
        """
        self._spared_bytes = self.way.most_spared_bytes
        self.way.always |= self.way.has_run
        in_one, in_two = self._in_two
        return least_bytes(self._budget_bytes()) if in_two else NONE_IN_TWO, in_one and in_two

    def writes(self, call: Lean) -> bool:
        """Whether an op that can take less is to do so.

        Args:
            call: What would run instead.
        """
        if call.is_decided:
            return True
        budget_bytes = self._budget_bytes()
        is_in_two = isinstance(call, InTwo)
        if is_in_two and self.in_two_above is not None:
            runs = call.spared_bytes > self.in_two_above
        else:
            taken = call.spared_bytes, call.taken_bytes
            runs = bool(budget_bytes) and self.way.runs(*taken, budget_bytes)
            if is_in_two and budget_bytes and call.spared_bytes > least_bytes(budget_bytes):
                self._in_two[runs] = True
        if runs:
            self.way.has_run = True
            self._notes[IN_TWO if is_in_two else IN_PLACE] = None
        return runs

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        """A planned backward runs inside this."""
        if not self.way.always:
            yield
            return
        with entered(_InPlace(self)):
            yield


class _InPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has ops write over the gradient that they read."""

    carries_out_ops = True

    def __init__(self, lean: LeanBackward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lean = lean
        self._formulas = Formulas()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for dynamo: nothing comes between torch's engine and what it calls."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self._lean.ops.instead(func, args, kwargs)
        if call is not None and self._lean.writes(call):
            return call.run(lambda op, given, named: op(*given, **named))
        return self._formulas.run(func, args, kwargs)
