"""The script's optimizer inside its own backward: gradients are used and let go as they come.

Responsible for making the updates while ``backward()`` runs, for the step that the script calls
right after it and that finds nothing left to do, and for saying, before anything is updated, why a
backward is no such one. Not responsible for the proof that the step follows at once
(:mod:`memfit.run.script.adjacent`).

What the script would see of it: gradients are gone between its step and its ``zero_grad()``. Who
looks at one then is told so by an error, and never reads ``None`` where there was a gradient. Nor
does an optimizer step with what a later backward has added to a gradient that is gone, as where one
loop clears its gradients before backward and the next one after the step.
"""

from __future__ import annotations

import contextlib
import weakref

from torch import Tensor
from torch.optim import Optimizer

from memfit.apply.executor import Executor
from memfit.apply.interrupts import interrupts_wait
from memfit.apply.optimizer_in_backward import OneByOne, UpdateWhenReady, held_parameters
from memfit.errors import UsageError
from memfit.run.script.gradients import GradientLooks
from memfit.tensors.optimizers import step_of_others
from memfit.tensors.storage import gradient_of

_HINT = "hint: run the script with `--forbid fuse_optimizer`"


class UpdatesMadeError(UsageError):
    """Parameters were updated, and the script does not go on as it was shown to."""


class UsedGradients:
    """Gradients that were used and let go, and that the script has not cleared since."""

    def __init__(self) -> None:
        """None was used yet."""
        self._of: dict[int, weakref.ref[Tensor]] = {}
        self._looks = GradientLooks()
        self._looks.on_clear = self._is_cleared

    def add(self, parameters: list[Tensor]) -> None:
        """Gradients were used.

        Args:
            parameters: Theirs.
        """
        self._of.update((id(parameter), weakref.ref(parameter)) for parameter in parameters)
        self._looks.install()

    def any_of(self, parameters: list[Tensor]) -> bool:
        """Whether those of some parameters are still to be cleared."""
        return any(self._has(parameter) for parameter in parameters)

    def require_cleared(self, optimizer: Optimizer) -> None:
        """Let an optimizer step.

        Args:
            optimizer: The optimizer.

        Raises:
            UpdatesMadeError: A gradient lacks what was used and let go.
        """
        for parameter in held_parameters(optimizer) if self._of else ():
            if self._has(parameter) and gradient_of(parameter) is not None:
                raise UpdatesMadeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was used and "
                    "let go, and the script adds to it without clearing it first\n" + _HINT
                )

    def _has(self, parameter: Tensor) -> bool:
        of = self._of.get(id(parameter))
        return of is not None and of() is parameter

    def _is_cleared(self, parameter: Tensor) -> None:
        self._of.pop(id(parameter), None)
        if not self._of:
            self._looks.remove()


USED_GRADIENTS = UsedGradients()
"""Those of the script, whichever loop they are of."""


class FusedUpdates:
    """Updates inside the script's backward.

    Attributes:
        waiting: Whether they were made and the script's step is still to come.
        looks: Who looks at gradients.
    """

    def __init__(self) -> None:
        """Make none yet."""
        self.looks = GradientLooks()
        self.waiting = False
        self._one_by_one: OneByOne | None = None
        self._update: UpdateWhenReady | None = None
        self._inside = contextlib.ExitStack()
        self._over_nothing: contextlib.ExitStack | None = None
        self._released: frozenset[int] = frozenset()

    def watch(self) -> None:
        """See who looks at gradients from here on."""
        self.looks.install()
        self.looks.begin()

    def rest(self) -> None:
        """Nothing is fused any more."""
        self.looks.on_look = None
        self.looks.remove()

    def require_none_waiting(self) -> None:
        """Let the script go on.

        Raises:
            UpdatesMadeError: It has run backward and not its optimizer.
        """
        if self.waiting:
            self.waiting = False
            raise UpdatesMadeError(
                "the script ran backward and did not call its optimizer, as it always had, and "
                f"memfit had made the updates already: parameters are a step ahead\n{_HINT}"
            )

    def begin(self, executor: Executor) -> str:
        """Backward is about to run: make the updates in it.

        Args:
            executor: Carries out a plan that fuses them.

        Returns:
            Why they cannot be made there, as a clause; empty where they are.
        """
        optimizer = executor.subject.optimizer
        assert optimizer is not None, "a plan that fuses has one"
        parameters = held_parameters(optimizer)
        if others := step_of_others(optimizer):
            return others
        if self.looks.by_others:
            return "the script looks at gradients after its step"
        if any(parameter.grad is not None for parameter in parameters):
            return "gradients are still there when backward begins"
        if USED_GRADIENTS.any_of(parameters):
            return "the script does not clear its gradients before backward"
        one_by_one = OneByOne(optimizer)
        update = UpdateWhenReady(one_by_one, executor.update_of)
        inside = contextlib.ExitStack()
        inside.enter_context(interrupts_wait())
        if executor.state is not None:
            inside.enter_context(executor.state.updates())
        for parameter in parameters:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
                inside.callback(handle.remove)
        self._one_by_one, self._update, self._inside = one_by_one, update, inside
        self.waiting = True
        self._released = frozenset(map(id, parameters))
        self.looks.on_look = self._too_late
        return ""

    def backward_ended(self) -> None:
        """Backward has run, or failed: what no hook told of is updated now."""
        update, self._update = self._update, None
        if update is None or self._one_by_one is None:
            return
        inside, self._inside = self._inside, contextlib.ExitStack()
        with inside:
            for parameter in held_parameters(self._one_by_one.optimizer):
                if parameter.grad is not None:
                    update(parameter)

    def step_begins(self, optimizer: Optimizer) -> bool:
        """The script has called an optimizer: that of the updates finds nothing to do.

        Args:
            optimizer: The optimizer.

        Returns:
            Whether it is that one.
        """
        one_by_one = self._one_by_one
        if one_by_one is None or not self.waiting or one_by_one.optimizer is not optimizer:
            return False
        USED_GRADIENTS.add([it for it in held_parameters(optimizer) if it.requires_grad])
        self._one_by_one, self.waiting = None, False
        self._over_nothing = contextlib.ExitStack()
        self._over_nothing.enter_context(one_by_one.over_nothing())
        return True

    def step_ended(self) -> None:
        """The script's step is over: its optimizer is as it was."""
        over_nothing, self._over_nothing = self._over_nothing, None
        if over_nothing is not None:
            over_nothing.close()

    def _too_late(self, parameter: Tensor) -> None:
        if id(parameter) in self._released:
            raise UpdatesMadeError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is asked for after "
                f"it was used and let go\n{_HINT}"
            )
