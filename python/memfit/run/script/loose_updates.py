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
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from memfit.apply.executor import Executor
from memfit.run.script.loop import Loop
from memfit.run.script.roots import Together
from memfit.run.script.step_updates import StepUpdates, live_bytes, state_bytes
from memfit.run.script.update_needs import UpdateNeeds, update_needs

LOOSE_STATE = "state of optimizers beside the model's is offloaded between their updates"
"""What is said at the end where that was done."""


@dataclass(slots=True, frozen=True)
class _Recorded:
    """An optimizer's step that ended a recorded pass.

    Attributes:
        needs: What its updates take.
        besides_bytes: What was live when it began, but for the state of all such optimizers.
    """

    needs: UpdateNeeds
    besides_bytes: int


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
        self._recorded: weakref.WeakKeyDictionary[Optimizer, _Recorded] = (
            weakref.WeakKeyDictionary()
        )
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

    def recorded_step_begins(
        self,
        optimizer: Optimizer,
        ended: Loop | None,
        loops: Sequence[Loop],
        gradients_away_bytes: int,
    ) -> None:
        """An optimizer is about to step, in a recorded pass or between passes: so it will later.

        Args:
            optimizer: The optimizer.
            ended: The loop whose pass ends with it; ``None`` between passes.
            loops: The loops so far.
            gradients_away_bytes: Bytes of all gradients that have no memory now.
        """
        if ended is not None:
            ended.placing.ends = weakref.ref(optimizer)
        loop = ended or next(reversed(loops), None)
        if loop is None or loop.root is None or (ended is None and loop.plans):
            return
        is_of_other = ended is not None and not loop.placing.updated_by([optimizer])
        if not (loop.placing.is_loose or is_of_other):
            return
        known = self._recorded.get(optimizer)
        try:
            needs = update_needs(optimizer, None if known is None else known.needs)
        except Exception:  # noqa: BLE001 - the script's own step tells of it, if it is one
            self._recorded.pop(optimizer, None)
            return
        here = sum(map(state_bytes, {*self._stepped, optimizer}))
        live = live_bytes(loop.device) + gradients_away_bytes
        self._recorded[optimizer] = _Recorded(needs, live - here)

    def foresee(self, loop: Loop) -> None:
        """Know what updates take that no plan for a loop's steps knows of.

        Args:
            loop: The loop, which is planned now.
        """
        placing = loop.placing
        ends = placing.ends() if placing.is_loose and placing.ends is not None else None
        placing.update_bytes = self._foreseen_bytes(ends)
        found = map(self._foreseen_bytes, list(self._recorded) if placing.update_bytes else ())
        placing.most_update_bytes = max(found, default=0)

    def _foreseen_bytes(self, optimizer: Optimizer | None) -> int:
        """Most bytes live at once in the updates of an optimizer; 0 where that is not known."""
        recorded = None if optimizer is None else self._recorded.get(optimizer)
        if recorded is None or optimizer is None:
            return 0
        live = recorded.besides_bytes + sum(map(state_bytes, {*self._stepped, optimizer}))
        executor, needs = self._executors.get(id(optimizer)), recorded.needs
        if executor is not None and executor.state is not None:
            return live + needs.largest_bytes(optimizer)
        return live + self._updates.foreseen_bytes(live, needs)

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
