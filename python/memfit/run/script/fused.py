"""The script's optimizer inside its own backward: gradients are used and let go as they come.

Responsible for making the updates while ``backward()`` runs, for the step that the script calls
right after it and that finds nothing left to do, and for saying, before anything is updated, why a
backward is no such one. Not responsible for the proof that the step follows at once
(:mod:`memfit.run.script.adjacent`).

What the script would see of it: gradients are gone between its step and its ``zero_grad()``. Who
looks at one then is told so by an error, and never reads ``None`` where there was a gradient.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from memfit.apply.executor import Executor
from memfit.apply.interrupts import interrupts_wait
from memfit.apply.optimizer_in_backward import OneByOne, UpdateWhenReady, held_parameters
from memfit.errors import UsageError
from memfit.run.script.gradients import GradientLooks

_HINT = "hint: run the script with `--forbid fuse_optimizer`"


class UpdatesMadeError(UsageError):
    """Parameters were updated, and the script does not go on as it was shown to."""


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
        self._ready = False

    def watch(self) -> None:
        """See who looks at gradients from here on."""
        self.looks.install()
        self.looks.begin()

    def rest(self) -> None:
        """Nothing is fused any more."""
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
        if self.looks.by_others:
            return "the script looks at gradients after its step"
        if any(parameter.grad is not None for parameter in parameters):
            return "gradients are still there when backward begins"
        if self._ready and not self.looks.cleared:
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
        self.looks.begin()
        self.looks.on_look = _too_late

    def step_begins(self) -> None:
        """The script has called its optimizer: it finds nothing to do."""
        one_by_one, self._one_by_one = self._one_by_one, None
        if one_by_one is not None and self.waiting:
            self.waiting = False
            self._over_nothing = contextlib.ExitStack()
            self._over_nothing.enter_context(one_by_one.over_nothing())

    def step_ended(self) -> None:
        """The script's step is over: its optimizer is as it was."""
        over_nothing, self._over_nothing = self._over_nothing, None
        if over_nothing is not None:
            over_nothing.close()
            self._ready = True
            self.looks.cleared = False

    def backward_begins(self) -> None:
        """Gradients are there again."""
        self.looks.on_look = None


def _too_late(parameter: Tensor) -> None:
    raise UpdatesMadeError(
        f"the gradient of a parameter of shape {list(parameter.shape)} is asked for after it was "
        f"used and let go\n{_HINT}"
    )
