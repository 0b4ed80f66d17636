"""Optimizers beside the one that a plan knows, as a decoder's beside its encoder's.

A pass is of one model, and its plan knows the state of that one's optimizer. A step may train
others with it, each with an optimizer of its own, or parts of the model may have one each, of which
plans know none. Responsible for having their state elsewhere from one update to the next, and their
updates made one by one, where the loops lack room. Not responsible for how
(:mod:`memfit.run.script.step_updates`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from memfit.apply.executor import Executor
from memfit.run.script.loop import Loop
from memfit.run.script.roots import Together
from memfit.run.script.step_updates import StepUpdates

LOOSE_STATE = "state of optimizers beside the model's is offloaded between their updates"
"""What is said at the end where that was done."""


class LooseUpdates:
    """The updates of optimizers that are no loop's."""

    def __init__(self, updates: StepUpdates) -> None:
        """Know of none yet.

        Args:
            updates: Makes them.
        """
        self._updates = updates
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._executors: dict[int, Executor] = {}
        # Nobody else holds what they update together.
        self._updated: weakref.WeakKeyDictionary[Optimizer, Together] = weakref.WeakKeyDictionary()

    def step_begins(
        self, optimizer: Optimizer, loops: Sequence[Loop], gradients_away: tuple[int, int] = (0, 0)
    ) -> bool:
        """An optimizer is about to step, as most do: with no arguments.

        Args:
            optimizer: The optimizer.
            loops: The loops so far.
            gradients_away: Bytes of all gradients that have no memory now, and of the largest.

        Returns:
            Whether its state is elsewhere.

        Raises:
            OffloadError: State did not come back as it went.
        """
        model = self._of(optimizer, loops)
        if model is None:
            self._executors.pop(id(optimizer), None)
            return False
        self._stepped.add(optimizer)
        held = self._executors.get(id(optimizer))
        executor = self._updates.unplanned_step_begins(model, optimizer, held, gradients_away)
        # Without state elsewhere it is asked again whether there is room: there may be next time.
        if executor is None or executor.state is None:
            return False
        self._executors[id(optimizer)] = executor
        return True

    def step_ended(self) -> None:
        """An optimizer has stepped."""
        self._updates.step_ended()

    def let_state_go(self, optimizers: Iterable[Optimizer], loops: Sequence[Loop]) -> bool:
        """Have state elsewhere until the next update.

        Args:
            optimizers: Those that no pass under way is updated by.
            loops: The loops so far.

        Returns:
            Whether any is.
        """
        for optimizer in self._stepped.intersection(optimizers):
            model = self._of(optimizer, loops)
            if model is not None and id(optimizer) not in self._executors:
                device = next(model.parameters()).device
                executor = self._updates.idle(model, optimizer, device)
                if executor is not None:
                    self._executors[id(optimizer)] = executor
        return bool(self._executors)

    def rest(self) -> None:
        """Let go of the optimizers until their next updates."""
        self._executors.clear()

    def _of(self, optimizer: Optimizer, loops: Sequence[Loop]) -> Together | None:
        """What an optimizer updates that no plan knows of; ``None`` of another one."""
        if any(loop.root is not None and loop.placing.planned_with([optimizer]) for loop in loops):
            return None
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = [it for it in updated if isinstance(it, nn.Parameter)]
        if not updated or len(parameters) < len(updated):
            return None
        known = self._updated.get(optimizer)
        if known is None or list(map(id, known.parameters())) != list(map(id, parameters)):
            known = self._updated[optimizer] = Together((), parameters)
        return known
