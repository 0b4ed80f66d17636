"""What the steps of a loop may take.

A budget that is a percentage is one of a step that has not run yet. Responsible for what it comes
to, once a step was recorded. Not responsible for what it comes to at least until then
(:mod:`memfit.run.script.percentage`), for keeping it, nor for leases
(:mod:`memfit.run.script.lease`).
"""

from __future__ import annotations

import torch

from memfit import _native
from memfit.run.script.lease import Room
from memfit.run.script.percentage import least_bytes
from memfit.run.script.recorded_step import RecordedStep
from memfit.run.script.remains import Passing
from memfit.run.script.step_updates import live_bytes


class LoopBudget:
    """The budget of one loop.

    Attributes:
        written: As the user wrote it, or its bytes once they are known.
        in_files_bytes: What waits in files beside the loop's step, which a percentage counts.
    """

    def __init__(self, written: str | int, room: Room, device: torch.device) -> None:
        """Know what was written.

        Args:
            written: The budget as the user wrote it, or bytes.
            room: What is leased.
            device: Where the loop is.
        """
        self.written = written
        self.in_files_bytes = 0
        self._room = room
        self._device = device

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage still."""
        return "%" in str(self.written)

    def bytes(self) -> int:
        """Its bytes; 0 while it is a percentage."""
        return 0 if self.is_share else _native.parse_budget(str(self.written), 0)

    def least_bytes(self) -> int:
        """Its bytes, or what a percentage comes to at least; 0 where not even that is known."""
        return least_bytes(self.written, live_bytes(self._device))

    def within(self) -> str | int:
        """It, or what the lease leaves of it."""
        return self._room.within(self.written)

    def of_step(
        self,
        step: RecordedStep,
        outside_bytes: int,
        passing: Passing = (),
        *,
        written: str | int | None = None,
    ) -> str | int:
        """What there is for a step; a percentage is one of all that it would have in memory.

        Args:
            step: The step.
            outside_bytes: What the script holds outside the step.
            passing: What of that goes in the course of the step.
            written: Another budget than this, as the user wrote it.
        """
        within = self._room.within(self.written if written is None else written)
        if "%" not in str(within) or not self.in_files_bytes:
            return within
        return step.share_bytes(str(within), outside_bytes + self.in_files_bytes, passing)
