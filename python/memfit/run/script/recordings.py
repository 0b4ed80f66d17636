"""Which steps of one loop were recorded, left their plans, or got no backward.

Responsible for how often a step may be recorded again. Not responsible for whether a plan tells
enough of it (:mod:`memfit.run.script.step_plans`).
"""

from __future__ import annotations

from collections import Counter

from memfit.run.script.planned_step import Key

MAX_RECORDED_AGAIN = 2
"""Times that steps of the same sizes are recorded again since one left its plan: what depends on
values, as routes and lengths do, is seldom as it was."""

MAX_RECORDINGS = 256
"""Passes that are recorded; accumulated gradients take many for one step."""

MAX_GIVEN_UP = 2
"""Calls of one kind that are recorded one after the other and get no backward."""

MAX_UNENDED = 3
"""Recordings of one kind, one after the other, that no step of an optimizer ends."""


class Recordings:
    """What became of the passes of one loop, by their keys."""

    def __init__(self) -> None:
        """There were none yet."""
        self._left_plan: set[Key] = set()
        self._again: Counter[Key] = Counter()
        self._given_up: Counter[Key] = Counter()
        self._unended: Counter[Key] = Counter()
        self._took_more: set[Key] = set()
        self._count = 0

    def ended(self, key: Key) -> None:
        """A recorded pass came to the end of its step.

        Args:
            key: Its key.
        """
        self._unended[key] = self._count = 0

    def ends_no_step(self, key: Key) -> bool:
        """Whether passes like one never end a step, as all micro-batches but the last."""
        return self._unended[key] >= MAX_UNENDED

    def forward_was(self, key: Key, *, given_up: bool) -> None:
        """A pass is over; one of its kind that gets a backward at last is worth recording.

        Args:
            key: Its key.
            given_up: Whether backward never began.
        """
        self._given_up[key] = self._given_up[key] + 1 if given_up else 0

    @property
    def some_are_given_up(self) -> bool:
        """Whether the latest pass of some kind got no backward."""
        return any(self._given_up.values())

    def is_given_up(self, key: Key) -> bool:
        """Whether passes like one got no backward too often."""
        return self._given_up[key] >= MAX_GIVEN_UP

    def took_more(self, key: Key) -> None:
        """A pass that nothing watched was over the budget, as one that calls other models too."""
        self._took_more.add(key)

    def has_taken_more(self, key: Key) -> bool:
        """Whether one was, so that a recording tells too little of those like it."""
        return key in self._took_more

    def left_plan(self, key: Key) -> None:
        """A pass has left its plan, or took more than a plan for another model foresaw."""
        self._left_plan.add(key)

    def has_left_plan(self, key: Key) -> bool:
        """Whether such a pass has, since it was recorded last."""
        return key in self._left_plan

    def is_again(self, key: Key) -> bool:
        """Whether such a pass was recorded because it had left its plan."""
        return self._again[key] > 0

    def asks_for_another(self, key: Key) -> bool:
        """Whether it is to be recorded for that."""
        return key in self._left_plan and self._again[key] < MAX_RECORDED_AGAIN

    def begins(self, key: Key) -> None:
        """A pass is recorded."""
        self._again[key] += key in self._left_plan
        self._left_plan.discard(key)
        self._unended[key] += 1
        self._count += 1

    @property
    def are_too_many(self) -> bool:
        """Whether so many were recorded that no step seems to come to its end."""
        return self._count > MAX_RECORDINGS
