"""Optimizer steps, seen through torch's global hooks.

Responsible for naming the blocks of a step while they live, so that the categories at a peak are
known later, and for telling listeners of steps. Not responsible for counting.

A gradient is born in backward, and dead when the next step begins: at the ends of a track it may
never be there. So just before and after an optimizer steps, the blocks of what it updates are named
to the count, and the names stay with the blocks even when they die. That is done only where an open
window has reached a new peak since, so a loop whose steps are all alike pays once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memfit import _native
from memfit.tensors.optimizers import step_of_others, unknown_optimizer
from memfit.track import cpu
from memfit.track.looks import LOOKS
from memfit.track.mapped import MAPPED_FILES
from memfit.track.owners import OWNERS, label, optimizer_tensors

Listener = Callable[[Literal["before", "closed", "after"], Optimizer], None]
"""Called before and after every step of every optimizer, and once its closure has run."""


class Steps:
    """The optimizer steps of this process.

    Attributes:
        listeners: Told of every step.
        has_arguments: Whether the step that began last was called with any, such as a closure.
        closure_is_first: Whether it runs its closure once, before it does anything else.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._lock = threading.Lock()
        self._watching = False
        self._windows: list[cpu.Window] = []
        self._named: dict[int, int] = {}
        self.listeners: list[Listener] = []
        self.has_arguments = self.closure_is_first = False
        self._since = 0

    def watch(self) -> None:
        """Register the hooks, once; without windows and listeners they do nothing."""
        with self._lock:
            if not self._watching:
                self._watching = True
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)

    def add(self, window: cpu.Window) -> None:
        """Name blocks for the peaks of a window."""
        with self._lock:
            self._windows.append(window)

    def remove(self, window: cpu.Window) -> None:
        """Name no more blocks for a window."""
        with self._lock:
            if window in self._windows:
                self._windows.remove(window)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._windows or self.listeners:
            MAPPED_FILES.step_begins(optimizer)
        self._name(optimizer)
        # The first is the optimizer.
        given = [it for it in (*args[1:], *kwargs.values()) if it is not None]
        self.has_arguments = bool(given)
        self.closure_is_first = len(given) == 1 and callable(given[0]) and _is_first(optimizer)
        self._since = _native.last_event() + 1
        for listener in list(self.listeners):
            listener("before", optimizer)
        if not (self.closure_is_first and self.listeners):
            return None
        closed = self._closed(optimizer, given[0])
        first, *others = args
        others = [closed if value is given[0] else value for value in others]
        named = {key: closed if it is given[0] else it for key, it in kwargs.items()}
        return (first, *others), named

    def _closed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after which listeners are told that the updates come."""

        @functools.wraps(closure)
        def closed() -> Any:
            result = closure()
            self._since = _native.last_event() + 1
            for listener in list(self.listeners):
                listener("closed", optimizer)
            return result

        return closed

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._name(optimizer)
        LOOKS.update_ended(self._since)
        for listener in list(self.listeners):
            listener("after", optimizer)

    def _name(self, optimizer: Optimizer) -> None:
        with self._lock:
            peaks = [window.peak_event() for window in self._windows]
        if not peaks:
            return
        if OWNERS.add(optimizer):
            self._named.pop(id(optimizer), None)
        if max(peaks) > self._named.get(id(optimizer), -1):
            self._named[id(optimizer)] = max(peaks)
            label(optimizer_tensors(optimizer))


def _is_first(optimizer: Optimizer) -> bool:
    """Whether a step runs its closure once and first, as all of torch's own but LBFGS do."""
    return not (
        isinstance(optimizer, LBFGS) or unknown_optimizer(optimizer) or step_of_others(optimizer)
    )


STEPS = Steps()
"""The steps of this process; torch's hooks are global."""
