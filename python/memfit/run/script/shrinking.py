"""A script's lease between two steps: smaller when another needs memory, as before when it can be.

Responsible for planning the script's steps for less and for going back to the plans before.
Not responsible for the lease itself (:mod:`memfit.run.script.lease`) nor for carrying plans out.

Only between steps, because there nothing of a step is live, and only where the steps of one loop
are all that is planned: what several models need together nobody has planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.answers import Plan
    from memfit.run.script.lease import Room
    from memfit.run.script.planned_step import PlannedStep

PLAN_SECONDS = 5.0
"""Longest that planning one step for less takes: the broker asks for about ten seconds."""

GROW_EVERY = 0.25
"""Seconds between two tries to have more again."""


class GivingWay:
    """How the steps of one loop follow the script's lease."""

    def __init__(self, room: Room) -> None:
        """Begin with the plans as they are.

        Args:
            room: The lease.
        """
        self._room = room
        self._tried = 0.0

    def between_steps(
        self,
        plans: Sequence[PlannedStep],
        outside_bytes: int,
        place: Callable[[Plan], object],
    ) -> None:
        """Answer a request to shrink, or try to have more again.

        Args:
            plans: The loop's plans, at least one; they are changed in place.
            outside_bytes: What the script holds besides its steps.
            place: Has the optimizer's state and the parameters where a plan wants them.

        Raises:
            OffloadError: What has to go could not be written; nothing was given back.
        """
        asked = self._room.asked()
        if asked is not None:
            self._make_room(plans, asked, outside_bytes, place)
        elif any(planned.wider is not None for planned in plans):
            self._grow(plans)

    def _make_room(
        self,
        plans: Sequence[PlannedStep],
        tensors: int,
        outside: int,
        place: Callable[[Plan], object],
    ) -> None:
        made = [
            planned.step.plan(max(tensors, 1), outside, planned.goes, time_limit=PLAN_SECONDS)
            for planned in plans
        ]
        peak = max(plan.planned.predicted_peak_bytes for plan in made)
        if peak >= max(planned.plan.planned.predicted_peak_bytes for planned in plans):
            self._room.decline()
            return
        for plan in made:
            place(plan)  # before anything is given back
        for planned, plan in zip(plans, made, strict=True):
            planned.wider = planned.wider or planned.plan
            planned.plan, planned.outside_bytes, planned.executor = plan, outside, None
        # Where no plan fits what is asked for: all that it can give.
        ratio = max(plan.predicted_step_ratio for plan in made)
        self._room.give(max(peak, tensors), peak, ratio)
        self._tried = time.monotonic()

    def _grow(self, plans: Sequence[PlannedStep]) -> None:
        now = time.monotonic()
        if now - self._tried < GROW_EVERY:
            return
        self._tried = now
        peak = max(
            (planned.wider or planned.plan).planned.predicted_peak_bytes for planned in plans
        )
        if not self._room.take_again(peak):
            return
        for planned in plans:
            if planned.wider is not None:
                planned.plan, planned.wider, planned.executor = planned.wider, None, None
