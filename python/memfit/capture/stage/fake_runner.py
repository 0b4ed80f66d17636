"""A step on fakes, whose backward takes what torch's takes without a mode.

Torch's engine adds gradients that meet in place, but not under a dispatch mode, as the recorder is:
then it makes a third tensor beside the two. Responsible for differentiating by the engine in Python
instead, and for leaving backward to torch where hooks run in it, which that engine does not follow;
hooks that are registered on a node itself are not seen, and take nothing in a recording. Not
responsible for what autograd's formulas do (:mod:`memfit.tensors.as_without_modes`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from memfit.capture.record.step import StepRunner
from memfit.capture.stage.backward_engine import BackwardEngine
from memfit.capture.stage.stage import Stage

_REGISTER = ((Tensor, "register_hook"), (Tensor, "retain_grad"), (BackwardHook, "__init__"))
"""What a forward calls to have something done in backward."""


class FakeRunner(StepRunner):
    """Runs the step of a stage of fakes."""

    def __init__(self, stage: Stage, recorder: Any) -> None:
        """Create a runner.

        Args:
            stage: A stage of fakes.
            recorder: What to write to.
        """
        super().__init__(stage, recorder)
        self.has_hooks = any(p._backward_hooks for p in stage.model.parameters())
        recorder.saved.file_by_node()

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """What surrounds the forward, and what sees whether hooks are to run in backward."""
        stack = contextlib.ExitStack()
        stack.enter_context(super().forward_context())
        stack.enter_context(self._seeing_hooks())
        return stack

    @contextlib.contextmanager
    def _seeing_hooks(self) -> Iterator[None]:
        originals = [(owner, name, getattr(owner, name)) for owner, name in _REGISTER]
        for owner, name, original in originals:
            setattr(owner, name, self._noting(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            self.has_hooks = True
            return original(*args, **kwargs)

        return register

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss."""
        recorder = self.recorder
        if self.has_hooks:
            recorder.saved.forget_nodes()
            super().backward(loss)
            return

        def started(node: tuple[int, str] | None) -> None:
            recorder.running_node = node

        BackwardEngine(started, recorder.saved.release_node).run(loss)
