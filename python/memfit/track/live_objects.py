"""The live objects of torch's classes: tensors, modules, optimizers, nodes written in Python.

A script that has imported torch has several hundred thousand Python objects, and a search through
all of them takes some 40 to 80 ms. While objects are followed, only the collector's young
generations are searched: those that are about to grow old are noted then, weakly. Responsible for
finding objects by their class. Not responsible for what they hold (:mod:`memfit.track.reach`).

Invariant: while followed, each live object of :data:`_FOLLOWED` that the collector knows is noted,
or in one of the young generations. One that a script froze when it was young (``gc.freeze``) is
neither, and stays unknown when it is unfrozen.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from memfit import _native

_FOLLOWED = (Tensor, Module, Optimizer, torch._C._FunctionBase)

_HAS_YOUNG_GENERATIONS = sys.version_info < (3, 14)
"""Whether two generations are searched by every collection, as later collectors do it otherwise."""

_YOUNG = (0, 1)

_MOST_UNASKED = 128
"""Collections after which nothing is noted any more, until objects are asked for again: they have
cost as much as a search through all."""


def instances(*families: type) -> list[Any]:
    """All live objects of some classes that the garbage collector knows, younger ones first."""
    if set(families).issubset(_FOLLOWED):
        return LIVE_OBJECTS.instances(families)
    return _among_all(families)


def _among_all(families: tuple[type, ...]) -> list[Any]:
    # `isinstance` would ask proxies for their class, and some of torch's warn when they are asked.
    # There are hundreds of thousands: no line of Python runs for each.
    return _native.instances(gc.get_objects(), families)


class LiveObjects:
    """What is known of the live objects of torch's classes."""

    def __init__(self) -> None:
        """Follow nothing yet."""
        self._process = 0
        self._is_noting = False
        self._unasked = 0
        # The collector may run in any thread, and in the middle of a search.
        self._aging: deque[list[weakref.ref[Any]]] = deque()
        self._old: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()
        self._swap: Any = None

    @property
    def is_following(self) -> bool:
        """Whether young objects only are searched."""
        return self._swap is not None

    def follow(self) -> None:
        """Search young objects only, from the next search on."""
        if not _HAS_YOUNG_GENERATIONS or self.is_following:
            return
        self._process = os.getpid()
        swap = self._swap = torch.utils.swap_tensors

        @functools.wraps(swap)
        def swap_tensors(t1: Tensor, t2: Tensor) -> None:
            tensors = {id(it): it for it in (t1, t2)}
            self._let_go(tensors)
            try:
                swap(t1, t2)  # type: ignore[no-untyped-call]
            finally:
                self._note(tensors.values())

        torch.utils.swap_tensors = swap_tensors

    def leave(self) -> None:
        """Search all objects again."""
        if self._swap is not None:
            torch.utils.swap_tensors, self._swap = self._swap, None
        self._stop()

    def instances(self, families: tuple[type, ...]) -> list[Any]:
        """Live objects of some of the classes that are followed, younger ones first."""
        if not self.is_following or self._process != os.getpid():
            return _among_all(families)
        with self._lock:
            self._unasked = 0
            is_noting = self._is_noting and self._collects in gc.callbacks
            if not is_noting:
                return self._begin(families)
            young = self._young()
            alive = {key: one for key, of in self._old.items() if (one := of()) is not None}
            self._old = {key: self._old[key] for key in alive}
            for one in young:
                alive.pop(id(one), None)
            return _native.instances([*young, *alive.values()], families)

    def note(self) -> None:
        """Note all that is young: the collector is about to be made to forget all objects."""
        with self._lock:
            if self._is_noting:
                self._note(self._young())
            else:
                self._begin(_FOLLOWED)

    def _young(self) -> list[Any]:
        # One that grows old meanwhile is in `_aging` by the time that is looked at.
        young = [it for age in _YOUNG for it in _of_age(age)]
        self._note_aging()
        return young

    def _begin(self, families: tuple[type, ...]) -> list[Any]:
        """Look at all objects once, and note from here on what grows old."""
        if self._collects not in gc.callbacks:
            gc.callbacks.append(self._collects)
        self._is_noting = True
        found = _among_all(_FOLLOWED)
        self._old = {id(one): weakref.ref(one) for one in found}
        return _native.instances(found, families)

    def _stop(self) -> None:
        if self._is_noting:
            self._is_noting = False
            if self._collects in gc.callbacks:
                gc.callbacks.remove(self._collects)
        self._aging.clear()
        self._old = {}

    def _collects(self, phase: str, about: dict[str, Any]) -> None:
        """Note what the collector is about to put into the oldest generation."""
        if phase != "start" or about["generation"] < max(_YOUNG):
            return
        self._unasked += 1
        if self._unasked > _MOST_UNASKED or self._process != os.getpid():
            self._stop()
            return
        self._aging.append([weakref.ref(one) for age in _YOUNG for one in _of_age(age)])

    def _note_aging(self) -> None:
        while self._aging:
            self._note(one for of in self._aging.popleft() if (one := of()) is not None)

    def _note(self, objects: Iterable[Any]) -> None:
        self._old.update({id(one): weakref.ref(one) for one in objects})

    def _let_go(self, tensors: dict[int, Tensor]) -> None:
        """Refer to some tensors no longer: torch swaps none that is referred to weakly."""
        if self._process != os.getpid():
            self._stop()  # another thread may have had the lock when this process was forked
            return
        with self._lock:
            self._note_aging()
            for key in tensors:
                self._old.pop(key, None)


def _of_age(age: int) -> list[Any]:
    return _native.instances(gc.get_objects(generation=age), _FOLLOWED)


LIVE_OBJECTS = LiveObjects()
"""Those of this process."""
