"""Standing in for the updates of the script's own ``optimizer.step()``.

Responsible for making the updates one by one where a plan keeps optimizer state or parameters
elsewhere. Not responsible for how (:mod:`memfit.apply.executor`) nor for seeing that the script
steps (:mod:`memfit.run.script.signals`).

The script calls the optimizer; torch's hooks tell of it before and after. Before, all updates are
made, parameter by parameter; until after, the optimizer lists no parameter. So the step that the
script called finds nothing to do, and whoever watches the optimizer sees one step, as ever. Where a
step is not stood in for (it has a closure, say), the optimizer reads its state and all parameters
at once, and what is read is in memory.
"""

from __future__ import annotations

import contextlib

from memfit.apply.executor import Executor
from memfit.apply.interrupts import interrupts_wait


class StandIn:
    """Makes the updates of a step before the script's optimizer does."""

    def __init__(self) -> None:
        """Stand in for nothing yet."""
        self._over_nothing: contextlib.ExitStack | None = None

    def step_begins(self, executor: Executor) -> None:
        """Make all updates, and leave nothing to the step that the script has called.

        Args:
            executor: Carries out a plan that keeps something elsewhere between steps.

        Raises:
            OffloadError: State or a parameter did not come back as it went.
        """
        self.step_ended()
        with executor.running(), interrupts_wait():
            updated = executor.update_all()
        self._over_nothing = contextlib.ExitStack()
        self._over_nothing.enter_context(updated.over_nothing())

    def step_ended(self) -> None:
        """The step that the script has called is over: its optimizer is as it was."""
        over_nothing, self._over_nothing = self._over_nothing, None
        if over_nothing is not None:
            over_nothing.close()
