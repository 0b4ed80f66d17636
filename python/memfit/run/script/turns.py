"""Whose turn it is, where several optimizers step in turn after passes that begin alike.

A generator and its discriminator may both be trained in passes that begin with the generator's
call: nothing of that call tells which of the two it is. The optimizer that stepped last does.
Responsible for noticing such passes, and for telling them apart. Not responsible for what a pass
begins with otherwise (:mod:`memfit.run.script.planned_step`).
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.run.script.sizes import kind_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memfit.run.script.planned_step import Call, Key


class Turns:
    """The optimizers that have stepped, and the passes that end with more than one of them."""

    def __init__(self) -> None:
        """None has stepped yet."""
        self._numbers = weakref.WeakKeyDictionary["Optimizer", int]()
        self._latest = 0
        self._first: dict[Key, int] = {}
        self._shared: set[Key] = set()

    def told_apart(self, call: Call) -> Call:
        """A call that begins a pass, with whose turn it is where passes like it have several ends.

        Args:
            call: The call.
        """
        is_shared = bool(self._shared) and kind_of(call.key) in self._shared
        return replace(call, turn=self._latest) if is_shared else call

    def ended(self, key: Key, optimizer: Optimizer) -> None:
        """An optimizer's step has ended a pass.

        Args:
            key: The key of the pass.
            optimizer: The optimizer.
        """
        self._latest = self._numbers.setdefault(optimizer, len(self._numbers) + 1)
        kind = kind_of(key)
        if self._first.setdefault(kind, self._latest) != self._latest:
            self._shared.add(kind)
