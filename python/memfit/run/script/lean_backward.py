"""Gradients written over those that they come from, where a backward lacks room.

Responsible for when that is done: from then on that a recorded backward had no room, or no plan
fits without; and for doing it in planned backwards, as the recorder does in those that it records.
Not responsible for which ops can (:mod:`memfit.tensors.backward_in_place`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from memfit.run.script.contexts import entered
from memfit.run.script.lean_ops import LeanWay
from memfit.tensors.as_without_modes import Formulas
from memfit.tensors.backward_in_place import BackwardInPlace, InPlace
from memfit.tensors.divisor_gradient import Step

IN_PLACE = "large gradients are written over those that they come from"
"""What is said at the end where some were."""


class LeanBackward:
    """The backwards of one loop.

    Attributes:
        way: Whether they write in place.
        ops: Which of their ops can.
    """

    def __init__(self, budget_bytes: Callable[[], int], notes: dict[str, None]) -> None:
        """None has written in place yet.

        Args:
            budget_bytes: Returns the budget; while that is 0, not known yet, nothing is done.
            notes: Said at the end; of those that did, too.
        """
        self.way = LeanWay()
        self.ops = BackwardInPlace()
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

    def is_recorded(self) -> None:
        """A recorded step is over: if one op wrote in place, from now on all do.

        A plan for it foresees no more for that than is so.
        """
        self._spared_bytes = self.way.most_spared_bytes
        self.way.always |= self.way.has_run

    def writes(self, call: InPlace | Step) -> bool:
        """Whether an op that can write over what it reads is to do so.

        Args:
            call: The op in place.
        """
        if call.is_decided:
            return True
        budget_bytes = self._budget_bytes()
        if not budget_bytes or not self.way.runs(call.spared_bytes, call.taken_bytes, budget_bytes):
            return False
        self.way.has_run = True
        self._notes[IN_PLACE] = None
        return True

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
