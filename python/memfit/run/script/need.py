"""Whether the passes of one loop need room that something else takes.

Responsible for telling whether others' optimizer state, or what the script holds, is to be
elsewhere in them. Not responsible for having it there (:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memfit.run.script.passes import Count
from memfit.run.script.step_plans import StepPlans
from memfit.run.script.step_updates import StepUpdates, live_bytes

_MULTIPLE_OF_LIVE = 5
"""A first step may take so many times what is live before it, for what costs little to prevent."""


class NeedOfRoom:
    """What one loop's passes need.

    Attributes:
        is_of_others: Whether another loop lacks room, in which this one's graphs may lie.
    """

    def __init__(
        self,
        device: torch.device,
        plans: StepPlans,
        updates: StepUpdates,
        observed: Count,
        is_refused: Callable[[], bool],
    ) -> None:
        """Need nothing yet.

        Args:
            device: Where the model is.
            plans: The plans of its steps.
            updates: Their updates, which know the budget.
            observed: What became of the steps that were observed.
            is_refused: Whether nothing is planned for it.
        """
        self.is_of_others = False
        self._device = device
        self._plans = plans
        self._updates = updates
        self._observed = observed
        self._is_refused = is_refused
        self._live_bytes = live_bytes(device)
        self._is_of_state = False

    def pass_begins(self) -> None:
        """A planned pass begins, for which all that goes has gone."""
        self._live_bytes = live_bytes(self._device)

    def fits(self) -> bool:
        """Whether all plans so far fit."""
        return all(planned.plan.fits for planned in self._plans)

    def keeps(self) -> bool:
        """Whether all steps so far keep the budget, by their plans or as they were recorded."""
        return not any(planned.lacking_bytes for planned in self._plans)

    def fails_with(self, more_bytes: int) -> bool:
        """Whether some planned step no longer fits once the script holds more.

        Args:
            more_bytes: How much more.
        """
        return any(planned.lacks_room(more_bytes) for planned in self._plans)

    def is_of_state(self) -> bool:
        """Whether its passes are to find the state of others' optimizers elsewhere."""
        if not self._is_of_state and not self._is_refused():
            if self._plans:
                more = live_bytes(self._device) - self._live_bytes
                self._is_of_state = any(planned.lacks_room(more) for planned in self._plans)
            else:
                self._is_of_state = self._is_tight()
        return self._is_of_state

    def is_of_held(self) -> bool:
        """Whether its next pass may not fit with all that the script holds in memory."""
        if self._is_refused() or self._device.type != "cpu":
            return False
        return not self.fits() if self._plans else self._is_tight()

    def is_of_garbage(self) -> bool:
        """Whether another model's first pass may not fit with what this one's have left."""
        return self._updates.is_tight(self._device, _MULTIPLE_OF_LIVE * live_bytes(self._device))

    def _is_tight(self) -> bool:
        """Whether a pass to be recorded may not fit with what others hold in memory."""
        live, before = live_bytes(self._device), self._observed.peak_bytes
        if self._observed.steps == 1:  # in which the state of optimizers came to be
            before += max(live - self._live_bytes, 0)
        return self._updates.is_tight(self._device, before or _MULTIPLE_OF_LIVE * live)
