"""The plans for the steps of one loop, by the sizes of its inputs.

Responsible for which plan a pass runs by: its own, one foreseen from two recorded sizes, the
nearest, or, for what is larger than every step that was planned, the plan of least peak. Not
responsible for when a step is recorded or planned again (:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from memfit.answers import Plan
from memfit.run.script.planned_step import Key, PlannedStep, begin_alike, elements
from memfit.run.script.recorded_step import RecordedStep
from memfit.run.script.sizes import RecordedSizes, covers, growth, kind_of

MAX_PLANS = 32
"""Plans that are kept; foreseen ones make room for others."""

_FEW, _ENOUGH = 2, 3
"""Sizes of a kind that are recorded, where no plan fits them and where some do, before steps of
other sizes run as recorded for want of a law."""

_LITTLE = 1.1
"""How many times as large a step is at most that runs by the plan of another."""

LEAST_BUDGET = "1B"
"""No plan fits it: the one of least peak is what comes of it."""

Planning = Callable[[RecordedStep, bool], Plan]
"""Plans a recorded step for what the script holds now; for the least peak where that is said."""


class StepPlans:
    """Plans of one loop.

    Attributes:
        foreseen_steps: Steps that ran by a plan for sizes that nobody had recorded.
        larger_steps: Steps larger than every one planned, which ran by the plan of least peak.
    """

    def __init__(self) -> None:
        """There are none yet."""
        self.foreseen_steps = 0
        self.larger_steps = 0
        self._plans: list[PlannedStep] = []
        self._sizes = RecordedSizes()

    def __iter__(self) -> Iterator[PlannedStep]:
        """The plans, oldest first."""
        return iter(self._plans)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._plans)

    @property
    def all(self) -> list[PlannedStep]:
        """The plans, oldest first."""
        return list(self._plans)

    def add(self, planned: PlannedStep) -> None:
        """Know a plan for a recorded step.

        Args:
            planned: The plan; it replaces one of the same key.
        """
        self._plans = [known for known in self._plans if known.key != planned.key]
        self._plans.append(planned)
        self._sizes.add(planned.key, planned.step)

    def distrust(self) -> None:
        """A step took more than was foreseen: nothing is foreseen any more."""
        self._sizes.distrust()
        self._plans = [planned for planned in self._plans if not planned.is_foreseen]

    def forbid(self, kind: str) -> list[PlannedStep]:
        """Leave a technique out of plans from now on.

        Args:
            kind: Its kind of action.

        Returns:
            The steps whose plans have it, and are to be planned again.
        """
        for planned in self._plans:
            planned.step.forbid(kind)
            planned.lowest = None
        return [it for it in self._plans if any(a.kind == kind for a in it.plan.actions)]

    def may_be_anothers(self) -> bool:
        """Whether they hold for another model like the one that was recorded.

        Not where a script's backward was shown to be followed by its step at once, nor where a
        model was shown to run in pieces.
        """
        actions = chain.from_iterable(planned.plan.actions for planned in self._plans)
        is_shown = any(action.kind == "fuse_optimizer" for action in actions)
        return bool(self._plans) and not is_shown and all(it.step.way is None for it in self._plans)

    def another_comes(self) -> None:
        """Another model comes in the place of the one that was recorded."""
        for planned in self._plans:
            planned.is_of_another = True
            planned.executor = planned.lowest = None

    def tell_nothing_of(self, key: Key) -> bool:
        """Whether a pass had better run as others were recorded than be recorded, too.

        Its kind was recorded for several sizes, and no law of sizes came of it: a packed sequence
        has other ops for each set of lengths. And it has room so.

        Args:
            key: Its key.
        """
        kind = kind_of(key)
        alike = [it for it in self._plans if kind_of(it.key) == kind and begin_alike(it.key, key)]
        recorded = [it for it in alike if not it.is_foreseen]
        if len(recorded) < _FEW or any(it.key == key for it in alike):
            return False
        nearest = self._nearest(key)
        is_enough = len(recorded) >= _ENOUGH or nearest.runs_as_recorded
        took = _recorded_peak_bytes(nearest, key)
        has_room = 0 < took <= nearest.plan.budget_bytes
        return is_enough and has_room and self._sizes.foreseen(key) is None

    def must_record(self, key: Key) -> bool:
        """Whether no plan says anything about a pass, or what one says of another is no help.

        Args:
            key: Its key.
        """
        if not any(begin_alike(planned.key, key) for planned in self._plans):
            return True
        if any(planned.key == key for planned in self._plans):
            return False
        nearest = self._nearest(key)
        if nearest.step.way is not None and kind_of(nearest.key) != kind_of(key):
            return True  # it would run whole, and unplanned
        if nearest.plan.fits and not self._is_larger(key):
            return False
        return self._sizes.foreseen(key) is None and not self._takes_less_by_plan(key)

    def _takes_less_by_plan(self, key: Key) -> bool:
        """Whether a step that is a little larger had better run by the plan of least peak.

        Several sizes were recorded, which took more than there is, and no law came of them.
        """
        nearest, kind = self._nearest(key), kind_of(key)
        recorded = [it for it in self._plans if kind_of(it.key) == kind and not it.is_foreseen]
        if len(recorded) < _FEW or kind_of(nearest.key) != kind or not nearest.plan.fits:
            return False
        is_over = nearest.observed_peak_bytes > nearest.plan.budget_bytes
        return is_over and growth(nearest.key, key) <= _LITTLE

    def chosen(
        self, key: Key, outside_bytes: int, planning: Planning, *, diverged: bool
    ) -> PlannedStep:
        """The plan for a pass.

        Args:
            key: Its key.
            outside_bytes: What the script holds besides.
            planning: Plans a step.
            diverged: Whether such a pass has left its plan before.
        """
        planned = next((known for known in self._plans if known.key == key), None)
        planned = planned or self._as_it_is(key)
        if planned is None and not diverged:
            planned = self._foreseen(key, outside_bytes, planning)
        if planned is None:
            planned = self._nearest(key)
            if self._is_larger(key) and not self.tell_nothing_of(key):
                self.larger_steps += 1
                return _lowest(planned, outside_bytes, planning)
        self.foreseen_steps += planned.is_foreseen
        return planned

    def fitting(self, planned: PlannedStep, outside_bytes: int, planning: Planning) -> PlannedStep:
        """A planned step, by the plan of least peak where the script holds too much for its own.

        Args:
            planned: The step.
            outside_bytes: What the script holds besides.
            planning: Plans a step.
        """
        if not planned.has_outgrown(outside_bytes):
            return planned
        return _lowest(planned, outside_bytes, planning)

    def _as_it_is(self, key: Key) -> PlannedStep | None:
        """A larger step that fits without any action: so does this one."""
        alike = (planned for planned in self._plans if covers(planned.key, key))
        free = (planned for planned in alike if planned.plan.fits and not planned.plan.actions)
        return next(free, None)

    def _foreseen(self, key: Key, outside_bytes: int, planning: Planning) -> PlannedStep | None:
        found = self._sizes.foreseen(key)
        if found is None:
            return None
        rounded, step = found
        known = next((planned for planned in self._plans if planned.key == rounded), None)
        if known is not None:
            return known
        alike = self._nearest(key)
        planned = replace(
            alike,
            key=rounded,
            step=step,
            plan=planning(step, False),  # noqa: FBT003
            outside_bytes=outside_bytes,
            left=[],
            passing_bytes=0,
            passes=(),
            wider=None,
            executor=None,
            is_foreseen=True,
            lowest=None,
            recorded_peak_bytes=_recorded_peak_bytes(alike, rounded),
        )
        if len(self._plans) >= MAX_PLANS:
            oldest = next((it for it in self._plans if it.is_foreseen), self._plans[0])
            self._plans.remove(oldest)
        self._plans.append(planned)
        return planned

    def _is_larger(self, key: Key) -> bool:
        """Whether no plan is for a step as large; another mode is an evaluation, mostly."""
        keys = [planned.key for planned in self._plans if planned.key[0] == key[0]]
        alike = [planned for planned in keys if kind_of(planned) == kind_of(key)]
        if alike:
            return not any(covers(planned, key) for planned in alike) and not self._has_room(key)
        return bool(keys) and elements(key) > max(map(elements, keys))

    def _has_room(self, key: Key) -> bool:
        """Whether a step that is a little larger has room by the plan of the one that is nearest.

        What it takes is taken to grow with the square of its inputs at most, as attention does.
        """
        nearest = self._nearest(key)
        if kind_of(nearest.key) != kind_of(key) or not begin_alike(nearest.key, key):
            return False
        plan, ratio = nearest.plan, growth(nearest.key, key)
        needed = plan.planned.predicted_peak_bytes * ratio**2
        return plan.fits and ratio <= _LITTLE and needed <= plan.budget_bytes

    def _nearest(self, key: Key) -> PlannedStep:
        """The plan for a key, else for the smallest larger one, else for the largest."""
        wanted = elements(key)

        def distance(planned: PlannedStep) -> tuple[bool, bool, bool, bool, int]:
            size = elements(planned.key)
            other_mode = planned.key[0] != key[0]
            is_other = not begin_alike(planned.key, key)
            return planned.key != key, is_other, other_mode, size < wanted, abs(size - wanted)

        return min(self._plans, key=distance)


def _recorded_peak_bytes(alike: PlannedStep, key: Key) -> int:
    """What a step that nobody recorded would take as recorded: as much as a like one, grown."""
    if kind_of(alike.key) != kind_of(key):
        return 0
    return int(alike.recorded_peak_bytes * max(growth(alike.key, key), 1.0))


def _lowest(planned: PlannedStep, outside_bytes: int, planning: Planning) -> PlannedStep:
    """A planned step by the plan of least peak."""
    if planned.lowest is None:
        plan = planning(planned.step, True)  # noqa: FBT003
        planned.lowest = replace(planned, plan=plan, executor=None, outside_bytes=outside_bytes)
    return planned.lowest
