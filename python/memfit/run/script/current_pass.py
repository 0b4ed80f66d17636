"""The pass that runs now, and what belongs to it.

Responsible for whether another call of a model goes on with it, and for whether its forward was
given up. Not responsible for when a pass begins and ends (:mod:`memfit.run.script.script`), nor for
how it runs (:mod:`memfit.run.script.passes`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from memfit.run.script.differentiable import Wanted
from memfit.run.script.passes import ObservedPass
from memfit.run.script.roots import Together

if TYPE_CHECKING:
    from torch import nn

    from memfit.run.script.loop import Loop
    from memfit.run.script.passes import Pass
    from memfit.run.script.planned_step import Call, Key
    from memfit.run.script.script_recorder import ScriptRecorder

MAX_ROOT_CALLS = 64
"""Calls of a model without a backward; beyond, the forward is taken to have been given up."""

FORBIDS_HOOKS = (
    "a transform of `torch.func` outside of its steps: nothing is planned there",
    "it differentiates by a transform of `torch.func`, which allows no hooks of saved tensors",
)
"""What is said of a loop whose steps are planned all the same, and why others are not."""

FORWARD_MODE = (
    "forward-mode differentiation outside of its steps: nothing is planned there",
    "it differentiates in forward mode, whose formulas are others where ops are watched",
)
"""The same."""

KEEPS_GRAPH = (
    "steps whose only backward keeps a graph (`create_graph=True`): nothing is planned there",
    "its only backward keeps a graph (`create_graph=True`), as if more were to be differentiated",
)
"""The same."""


class CurrentPass:
    """The pass under way.

    Attributes:
        loop: Whose it is.
        in_closure: Whether an optimizer called it, in its step.
        root: What is called, where that is no module that somebody else holds.
        key: Its key.
        running: How it runs.
        wanted: What of its outputs is still differentiable.
        keeps_graph: Whether a backward has run in its forward that may be differentiated.
    """

    __slots__ = ("_called", "in_closure", "keeps_graph", "key", "loop", "root", "running", "wanted")

    def __init__(
        self, loop: Loop, root: nn.Module, call: Call, running: Pass, *, in_closure: bool
    ) -> None:
        """Know what runs.

        Args:
            loop: Whose pass it is.
            root: What is called.
            call: The call.
            running: How it runs.
            in_closure: Whether an optimizer calls it, in its step.
        """
        self.loop = loop
        self.in_closure = in_closure
        self.root = root if isinstance(root, Together) else None  # nothing else may hold it
        self.key: Key = call.key
        self.running = running
        self.wanted = Wanted()
        self.keeps_graph = False
        self._called = weakref.ref(call.module)

    def goes_on_with(self, root: nn.Module, called: nn.Module) -> bool:
        """Whether the call of a module belongs to this pass.

        Args:
            root: The root that it is of.
            called: The module.
        """
        running = self.running
        if not running.in_forward:
            return False
        if self.is_given_up():
            return False
        if not self.loop.is_of(root):
            return self.loop.takes_in(root, running)
        if self._called() is called:  # others come in any number, as partners do
            if running.root_calls >= MAX_ROOT_CALLS or not running.continues():
                return False
            running.root_calls += 1
        return True

    def is_given_up(self) -> bool:
        """Whether its forward gets no backward: nothing can be differentiated through it."""
        keeps_more = self.loop.differentiates_more or self.running.holds_graph()
        return not keeps_more and self.wanted.is_nothing()


def recorder_of(current: CurrentPass | None) -> ScriptRecorder | None:
    """What records the pass under way, if anything does.

    Args:
        current: The pass; ``None`` without one.
    """
    running = None if current is None else current.running
    return running.recorder if isinstance(running, ObservedPass) else None
