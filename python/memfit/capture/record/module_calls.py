"""Which module is running, and which ops each module call spans.

Responsible for the stack of running modules and for regions, which are those of one thread; what
other threads call in forward cannot be recorded. Not responsible for ops. It works by ``torch``'s
global module hooks, put in for the time of a step only, so no module is touched; a call that raises
is closed like any other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from memfit.capture.record.ledger import Ledger
from memfit.errors import CaptureError


@dataclass(slots=True)
class Region:
    """One call of one module.

    Attributes:
        module: Module path; empty for the root.
        class_name: Name of its class.
        call: How many times the module had been entered before in the step.
        start: First op of the call.
        end: One past its last op.
    """

    module: str
    class_name: str
    call: int
    start: int
    end: int


@dataclass(slots=True)
class LearningCalls:
    """Calls of modules that have trainable parameters of their own.

    Attributes:
        count: All of them.
        without_gradients: Those that began while gradients were off.
    """

    count: int = 0
    without_gradients: int = 0

    def add(self, module: nn.Module) -> None:
        """Count a call that begins."""
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            self.count += 1
            self.without_gradients += not torch.is_grad_enabled()


class ModuleCalls:
    """Tracks module calls while it is entered.

    Attributes:
        path: Path of the innermost running module of the model; empty outside any.
        regions: The calls of the forward phase, in order of entry.
        recording: Whether calls become regions; off in backward, where user checkpointing may call
            modules again.
        learning: The calls of the forward phase that could let a loss depend on parameters.
        in_threads: Path of a module that forward called in another thread; ``None`` without one.
    """

    def __init__(self, model: nn.Module, ledger: Ledger) -> None:
        """Create a tracker.

        Args:
            model: The model whose modules have paths.
            ledger: Tells the position.
        """
        self.path = ""
        self.regions: list[Region] = []
        self.recording = True
        self.learning = LearningCalls()
        self.in_threads: str | None = None
        self._thread = threading.get_ident()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._ledger = ledger
        self._stack: list[tuple[int, str, Region | None]] = []
        self._calls: dict[int, int] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        """Put the hooks in."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the hooks out and close what is still open."""
        for handle in self._handles:
            handle.remove()
        while self._stack:
            self._leave()

    @property
    def inside(self) -> bool:
        """Whether any module is running."""
        return bool(self._stack)

    def refuse_threads(self) -> None:
        """Refuse a forward that called modules in other threads.

        Raises:
            CaptureError: It did; what they did was not seen, or was mixed up.
        """
        if self.in_threads is not None:
            message = (
                f"forward calls `{self.in_threads or 'the model'}` in another thread, and a step "
                "is recorded in one"
            )
            hint = "have forward call its modules in its own thread, at least while it is planned"
            raise CaptureError(f"{message}\nhint: {hint}")

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the step's, and not one of autograd's."""
        return threading.get_ident() != self._thread and torch._C._current_autograd_node() is None

    def _before(self, module: nn.Module, _args: Any) -> None:
        identity = id(module)
        path = self._paths.get(identity)
        if self.recording and self._is_elsewhere():
            if path is not None:
                self.in_threads = path
                self.refuse_threads()
            return  # somebody else's
        region = None
        if path is not None and self.recording:
            self.learning.add(module)
            call = self._calls.get(identity, 0)
            self._calls[identity] = call + 1
            region = Region(path, type(module).__name__, call, self._ledger.now, self._ledger.now)
            self.regions.append(region)
        self._stack.append((identity, self.path, region))
        if path is not None:
            self.path = path

    def _after(self, module: nn.Module, _args: Any, _result: Any) -> None:
        identity = id(module)
        if self.recording and self._is_elsewhere():
            return
        if not any(entry[0] == identity for entry in self._stack):
            return
        while self._stack:
            closed = self._stack[-1][0]
            self._leave()
            if closed == identity:
                return

    def _leave(self) -> None:
        _, self.path, region = self._stack.pop()
        if region is not None:
            region.end = self._ledger.now
