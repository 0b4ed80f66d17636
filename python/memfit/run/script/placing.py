"""Where one loop has its parameters and the optimizer's state.

Responsible for the executor that keeps them elsewhere, before, in and after each pass. Not
responsible for which plan a pass runs by (:mod:`memfit.run.script.loop`), for the optimizer's
updates (:mod:`memfit.run.script.step_updates`) nor for moving anything
(:mod:`memfit.apply.executor`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.answers import Plan
from memfit.apply.executor import OF_OPTIMIZER, Executor, Subject, without
from memfit.apply.offload.parameters import bring_parameters_home
from memfit.apply.offload.state_view import bring_home
from memfit.run.script.evaluations import Evaluations
from memfit.run.script.passes import Count
from memfit.run.script.place import strays_to
from memfit.run.script.planned_step import Key
from memfit.run.script.request import FitRequest
from memfit.run.script.step_updates import StepUpdates, state_alone


class Placing:
    """What keeps parameters and state of one loop elsewhere.

    Attributes:
        executor: What does since the latest pass began; ``None`` where all is in memory.
        waiting: What does for what runs between steps, until the next pass begins.
        is_loose: Whether plans know no optimizer of the model: several update it, or its passes end
            with the step of another's.
        ends: The optimizer, weakly, whose step ended the latest recorded pass; ``None`` before it.
        update_bytes: Most bytes live at once in the updates that end passes, where plans know
            nothing of them; 0 where that is not known.
        most_update_bytes: The same of all updates in an iteration.
        in_closure: Whether an optimizer calls the model in its step, and reads its state there.
    """

    def __init__(
        self,
        root: weakref.ref[nn.Module],
        device: torch.device,
        request: FitRequest,
        updates: StepUpdates,
        is_refused: Callable[[], bool],
    ) -> None:
        """Have all in memory.

        Args:
            root: The model.
            device: Where it is.
            request: Where things may go.
            updates: The updates of the loop's steps.
            is_refused: Whether nothing is planned for it.
        """
        self.executor: Executor | None = None
        self.waiting: Executor | None = None
        self.in_closure = False
        self.is_loose = False
        self.ends: weakref.ref[Optimizer] | None = None
        self.update_bytes = self.most_update_bytes = 0
        self._root = root
        self._device = device
        self._request = request
        self._updates = updates
        self._is_refused = is_refused

    def another_comes(self, root: weakref.ref[nn.Module]) -> None:
        """Another model comes in the place of one that is gone, with all in memory.

        Args:
            root: The other one.
        """
        self._root = root
        self.rest()

    def model(self) -> nn.Module:
        """The model."""
        model = self._root()
        assert model is not None, "asked for only while the script calls the model"
        return model

    @property
    def held(self) -> Executor | None:
        """What keeps things elsewhere now."""
        return self.waiting or self.executor

    @property
    def has_parameters_elsewhere(self) -> bool:
        """Whether parameters may be offloaded now."""
        return self.held is not None and self.held.parameters is not None

    def updated_by(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """Those optimizers that update parameters of the model."""
        return updated_by(self.model(), optimizers)

    def planned_with(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """The one whose state and updates plans for the model's steps know, if there is one.

        Others have state and updates for themselves (:mod:`memfit.run.script.loose_updates`), and
        plans find what of it is in memory.
        """
        own = self.updated_by(optimizers)
        self.is_loose = self.is_loose or len(own) > 1
        return [] if self.is_loose else own

    def let_state_go(self, optimizers: Iterable[Optimizer]) -> None:
        """Have the optimizer's state elsewhere until the next pass, or its next update.

        Args:
            optimizers: Those that no pass under way is updated by.
        """
        optimizer, held = self._whose_state_may_go(optimizers), self.executor
        if optimizer is not None:
            self.executor = self._updates.idle(self.model(), optimizer, self._device, held) or held

    def let_state_wait(self, optimizers: Iterable[Optimizer]) -> None:
        """Have it elsewhere for what runs between steps; the next pass finds it as it was.

        Args:
            optimizers: As above.
        """
        optimizer = self._whose_state_may_go(optimizers)
        if optimizer is not None:
            waiting = self._updates.waiting(self.model(), optimizer, self._device, self.executor)
            self.waiting = waiting or self.waiting

    def _whose_state_may_go(self, optimizers: Iterable[Optimizer]) -> Optimizer | None:
        if self._is_refused() or self.in_closure or self._root() is None:
            return None  # one that calls the model in its step reads all of its state there
        own, held = self.planned_with(optimizers), self.held
        return own[0] if own and (held is None or held.state is None) else None

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """What may use parameters that are elsewhere runs inside this."""
        held = self.held
        return contextlib.nullcontext() if held is None else held.running()

    def in_forward(self) -> contextlib.AbstractContextManager[None]:
        """What the script's own code runs inside in a forward."""
        held = self.held
        return contextlib.nullcontext() if held is None else held.in_forward()

    def bring_home(self) -> None:
        """Have all parameters in memory until the next planned pass; nothing uses them meanwhile.

        Raises:
            OffloadError: One did not come back as it went.
        """
        root = self._root()
        if root is not None:
            bring_parameters_home(root)

    def leave_plan(self) -> None:
        """Have all parameters in memory, and the state alone where it is.

        Raises:
            OffloadError: One did not come back as it went.
        """
        self.executor = state_alone(self.executor)
        self.bring_home()

    def for_evaluation(self, key: Key, evaluations: Evaluations) -> Executor | None:
        """Have parameters where they are to be in a call without gradients.

        Args:
            key: Its key.
            evaluations: What is known of such calls.

        Returns:
            What keeps them there.
        """
        placed = evaluations.placed(key, self.model(), self.held)
        if self.waiting is None:
            self.executor = placed
        else:
            self.waiting = placed
        return placed

    def pass_begins(self, own: list[Optimizer], waiting: Executor | None) -> list[str]:
        """Have things where they were in the pass before.

        Args:
            own: The optimizers that update the model.
            waiting: What kept them elsewhere between the two.

        Returns:
            Parameters that the script keeps views of.

        Raises:
            OffloadError: Something did not come back as it went.
        """
        if waiting is not None:
            waiting.place()  # parameters go before the state comes
            for optimizer in own if self.executor is None else ():
                bring_home(optimizer)
        if self.executor is None:
            return []
        self.executor.place()
        parameters = self.executor.parameters
        return [] if parameters is None else parameters.viewed()

    def for_recording(self, optimizers: list[Optimizer], seen: Count, least_bytes: int = 0) -> None:
        """Have in memory what a recorder is to see; the state may be elsewhere.

        Args:
            optimizers: Those that update the model.
            seen: The passes that were recorded so far.
            least_bytes: What the pass is taken to need at least.
        """
        self._updates.record()
        self.executor = state_alone(self.executor)
        if self.executor is None:
            for optimizer in optimizers:
                bring_home(optimizer)
        self.bring_home()
        if self.executor is None:
            self.executor = self._updates.recording_begins(
                self.model(),
                optimizers,
                max(seen.peak_bytes, least_bytes),
                is_second=seen.steps == 1,
            )

    def for_plan(
        self,
        plan: Plan,
        optimizers: list[Optimizer],
        held: Executor | None = None,
        called: nn.Module | None = None,
        not_called: tuple[str, ...] = (),
    ) -> Executor:
        """Have the optimizer's state and the parameters where a plan wants them in a pass.

        Args:
            plan: The plan.
            optimizers: Those that update the model.
            held: What carried the plan out before.
            called: What runs in pieces, if the plan has any; ``None`` for the model.
            not_called: Paths of modules that the recorded step did not call.

        Raises:
            OffloadError: Some of it could not be written, and is at home.
        """
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        strays = strays_to(self._request, self._device.type)
        if all(action.kind != "micro_batch" for action in plan.actions):
            called = None  # others carry out on the model what they would on any part of it
        of = None if called is None else weakref.ref(called)
        left_out = not_called if strays and called is None else ()
        subject = Subject(
            self._root,
            optimizer,
            strays_to=strays,
            warn=False,
            called=of,
            in_script=True,
            not_called=left_out,
        )
        if held is None or held.subject != subject:
            said = plan.as_dict()
            actions = said if optimizer is not None else without(said, OF_OPTIMIZER)
            held = Executor(actions, subject, after=self.executor)
        self.executor = held
        held.place()
        return held

    def rest(self) -> None:
        """Let go of the model until the next pass."""
        self.executor = self.waiting = None


def updated_by(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those optimizers that update parameters of a model.

    Args:
        model: The model.
        optimizers: The optimizers.
    """
    own = {id(p) for p in model.parameters()}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
    ]
