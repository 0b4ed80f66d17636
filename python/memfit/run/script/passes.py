"""One forward of the script with the backward after it, in each of the ways it can run.

Responsible for what is installed during a pass, and for its peak. Not responsible for which way a
pass runs (:mod:`memfit.run.script.loop`) nor for when it begins and ends
(:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.apply.executor import Executor, Subject
from memfit.run.script.contexts import Nesting
from memfit.run.script.observed import Observation, StepRecording
from memfit.run.script.planned_step import Call, Key
from memfit.run.script.script_recorder import ScriptRecorder
from memfit.run.script.update_needs import UpdateNeeds
from memfit.run.script.verdict import Peak

Kind = Literal["observed", "planned", "unplanned"]
"""How a pass runs."""


@dataclass(slots=True)
class Count:
    """What became of some of a loop's steps.

    Attributes:
        steps: How many came to their end.
        peak_bytes: The highest peak of all passes that ran so.
        step_peak_bytes: The highest peak of those steps, which is what a prediction is about.
    """

    steps: int = 0
    peak_bytes: int = 0
    step_peak_bytes: int = 0

    def passed(self, peak_bytes: int, *, is_step: bool) -> None:
        """Count a pass.

        Args:
            peak_bytes: Its peak.
            is_step: Whether it came to its end, as one without an optimizer's step does not.
        """
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if is_step:
            self.step_peak_bytes = max(self.step_peak_bytes, peak_bytes)


def _modes() -> int:
    """How many modes see the ops that run now; one does not see those of its own."""
    return torch._C._len_torch_dispatch_stack()


class Pass:
    """A pass that runs as it is.

    Attributes:
        kind: How it runs.
        root_calls: Calls so far of the model that began it.
        in_forward: Whether backward has not begun.
        undoes: Whether the script's checkpoints are undone in it.
        departure: Why it runs unplanned, or where it has left its plan; empty if it has not.
        fits: Whether it runs by a plan that keeps the budget.
    """

    kind: Kind = "unplanned"
    fits = False

    undoes = False

    def __init__(self, device: torch.device, departure: str = "") -> None:
        """Begin; the model is about to run.

        Args:
            device: Where the model is.
            departure: Why it runs unplanned.
        """
        self.departure = departure
        self.root_calls = 1
        self.in_forward = True
        self._peak = Peak(device)
        self._modes = _modes()

    @property
    def is_at_rest(self) -> bool:
        """Whether no op runs, and no module that is watched, so that it may end here."""
        return _modes() == self._modes

    def continues(self) -> bool:
        """Whether another call of the model, before any backward, belongs to this pass."""
        return False

    def holds_graph(self) -> bool:
        """Whether something that forward saved is known to be still needed."""
        return False

    def leaves_modules(self) -> bool:
        """Have nothing on the model's modules from here on; ``False`` where it cannot go on so."""
        return True

    def leaves_hooks(self) -> bool:
        """Have no hooks of saved tensors from here on; ``False`` where it cannot go on so."""
        return True

    def asks_for_gradients(self) -> None:
        """Autograd is asked for gradients on the way, as part of forward."""

    def backward_begins(self) -> None:
        """Backward is about to begin, the first time or again."""
        self.in_forward = False

    def backward_ended(self) -> None:
        """Backward has run."""

    def peak_so_far(self) -> int:
        """Most bytes live at once on the model's device since it began."""
        return self._peak.so_far()

    def end(self) -> int:
        """End it wherever it is.

        Returns:
            Most bytes live at once on the model's device.
        """
        return self._peak.close()


class ObservedPass(Pass):
    """A pass under the recorder."""

    kind: Kind = "observed"

    def __init__(
        self,
        device: torch.device,
        root: nn.Module,
        call: Call,
        optimizers: Iterable[Optimizer],
        way: dict[str, Any] | None = None,
        budget_bytes: int = 0,
        folder: str = "",
        inside: contextlib.AbstractContextManager[None] | None = None,
        most_bytes: int | None = None,
    ) -> None:
        """Begin to record.

        Args:
            device: Where the model is.
            root: The model.
            call: What is about to be called in it.
            optimizers: The optimizers known to update it.
            way: The action by which it is to run: on pieces of the model's batch, with its loss in
                slices, or under autocast; ``None`` for as it is.
            budget_bytes: What it may take; 0 where that is not known.
            folder: Where saved tensors go meanwhile; empty for that of temporary files.
            inside: What its forward runs inside instead of a way.
            most_bytes: Where nothing is written down, up to how much in memory what autograd saves
                stays there.
        """
        super().__init__(device)
        self.effect = ""
        self._way = way
        self._called, self._key = call.path, call.key
        self._executor = Executor(
            {"actions": [way] if way else []},
            Subject(weakref.ref(root), called=weakref.ref(call.module), warn=False, in_script=True),
        )
        self._in_way = contextlib.ExitStack()
        self._in_way.enter_context(inside or self._executor.forward())
        where = (device.type, budget_bytes, folder)
        self._recording: StepRecording | None = StepRecording(
            root, call.inputs, optimizers, *where, most_bytes=most_bytes
        )
        self._modes = _modes()

    def follows(self, before: tuple[Key, Observation] | None) -> None:
        """Watch where in it goes what the recorded pass before it left.

        Args:
            before: The key of that pass, and its recording; ``None`` without one.
        """
        if before is not None and self._recording is not None and before[0] == self._key:
            self._recording.follows(before[1].remains)

    def leaves_modules(self) -> bool:
        """Whether nothing is there: a way stands in for what is called."""
        return self._way is None

    def leaves_hooks(self) -> bool:
        """No: what is saved without them is in no recording."""
        return False

    def asks_for_gradients(self) -> None:
        """Know it: a piece is differentiated once."""
        self.effect = self.effect or "it asks autograd for gradients as part of its computation"

    @property
    def recorder(self) -> ScriptRecorder | None:
        """What records it, until it is finished."""
        return self._recording.recorder if self._recording is not None else None

    def holds_graph(self) -> bool:
        """Whether something that forward saved is still needed."""
        return self._recording is not None and self._recording.holds_graph()

    def continues(self) -> bool:
        """Whether what the forward saved so far is still needed."""
        return self.holds_graph()

    def backward_begins(self) -> None:
        """End the forward of the recording."""
        self._in_way.close()
        if self._recording is not None:
            self._recording.backward_begins()
        super().backward_begins()

    def backward_ended(self) -> None:
        """Go on with the optimizer's part of the recording."""
        if self._recording is not None:
            self._recording.backward_ended()

    def updates_begin(self, needs: UpdateNeeds) -> None:
        """The optimizer is about to step.

        Args:
            needs: What that takes.
        """
        if self._recording is not None:
            self._recording.updates_begin(needs)

    def leave_out_updates(self) -> None:
        """Record nothing of the optimizer's step, which is about to begin: memfit makes it."""
        if self._recording is not None:
            self._recording.leave_out_updates()

    def finish(self, optimizers: Iterable[Optimizer]) -> Observation | None:
        """End the recording; the step is complete.

        Args:
            optimizers: Those that update the model.

        Returns:
            The recording; ``None`` where it was finished before.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        found = recording.finish(optimizers, self.root_calls)
        found.undoes, found.way, found.called = self.undoes, self._way, self._called
        found.effect = self.effect or self._executor.divergence
        found.less = None if self.effect else self._executor.fewer_slices
        return found

    def end(self) -> int:
        """Give up what was recorded, if it was not finished."""
        self._in_way.close()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.abandon()
        return super().end()


class PlannedPass(Pass):
    """A pass that runs by a plan."""

    kind: Kind = "planned"

    def __init__(
        self,
        device: torch.device,
        executor: Executor,
        root_calls: int,
        on_forward_end: Callable[[str, bool], None],
    ) -> None:
        """Begin the planned forward.

        Args:
            device: Where the model is.
            executor: Carries out the plan.
            root_calls: Calls of the model in the step that was planned.
            on_forward_end: Told when forward is over, with a sentence where it left the plan, and
                whether it got no backward.
        """
        super().__init__(device)
        self._executor = executor
        self._expected_calls = root_calls
        self._on_forward_end = on_forward_end
        self._forward: contextlib.AbstractContextManager[None] | None = executor.forward()
        self._forward.__enter__()
        self._nesting = Nesting()
        self._modes = _modes()

    def continues(self) -> bool:
        """Whether the planned step calls the model more often."""
        return self.root_calls < self._expected_calls

    def leaves_modules(self) -> bool:
        """End the planned forward; what it has seen so far holds."""
        self._leave()
        return True

    def leaves_hooks(self) -> bool:
        """The same."""
        return self.leaves_modules()

    def backward_begins(self) -> None:
        """End the planned forward."""
        self._leave()
        super().backward_begins()

    def end(self) -> int:
        """End the planned forward, if backward never began."""
        self._leave(is_given_up=self.in_forward)
        return super().end()

    def _leave(self, *, is_given_up: bool = False) -> None:
        forward, self._forward = self._forward, None
        if forward is None:
            return
        with self._nesting.cleared():
            forward.__exit__(None, None, None)
        self.departure = self._executor.divergence if self._executor.diverged else ""
        self._on_forward_end(self.departure, is_given_up)
