"""Autograd's engine, seen when it runs.

Responsible for telling listeners that a backward begins and ends. Not responsible for what follows.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, autograd


class Listener(Protocol):
    """Told of every run of the engine, on the thread that runs it."""

    def backward_begins(self) -> None:
        """It is about to run, for ``backward`` or ``grad``."""

    def backward_ended(self) -> None:
        """It has run, or raised."""


class Backwards:
    """The backwards of this process.

    Attributes:
        runs: How many have begun since somebody watches.
        retaining: How many of them were to keep their graph, for no other reason than that they
            were told to.
        keeping: How many kept it, for whatever reason.
        roots: What those under way, one in the other, were asked to differentiate.
        begin: The number of the first node that is made while one is under way.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._listeners: list[Listener] = []
        self._is_watching = False
        self.runs = 0
        self.retaining = self.keeping = 0
        self.roots: tuple[Tensor, ...] = ()
        self.begin = 0

    def watch(self, listener: Listener) -> None:
        """Tell a listener, from now on."""
        if listener not in self._listeners:
            self._listeners.append(listener)
        if self._is_watching:
            return
        # `backward` and `grad` both call it by this name.
        engine = getattr(autograd, "_engine_run_backward", None)
        if engine is None:
            return
        self._is_watching = True

        @functools.wraps(engine)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            self.keeping += bool(args[2])
            self.retaining += args[2:4] == (True, False)  # and makes no graph of its own
            outer = self.roots, self.begin
            self.roots = (*self.roots, *args[0])
            if not outer[0]:
                self.begin = torch._C._autograd._get_sequence_nr()
            try:
                for one in self._listeners:
                    one.backward_begins()
                try:
                    return engine(*args, **kwargs)
                finally:
                    for one in self._listeners:
                        one.backward_ended()
            finally:
                self.roots, self.begin = outer

        autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]


BACKWARDS = Backwards()
"""The backwards of this process; torch has one engine."""
