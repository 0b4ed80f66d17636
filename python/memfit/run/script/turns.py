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
    from torch import nn
    from torch.optim import Optimizer

    from memfit.run.script.planned_step import Call, Key


def take_turns(key: Key, other: Key) -> bool:
    """Whether two passes begin alike, and it is known that it is another optimizer's turn in each.

    Args:
        key: The key of the one.
        other: The key of the other.
    """
    (path, _, _, turn, *_), (other_path, _, _, other_turn, *_) = key[0], other[0]
    return bool(path == other_path and turn and other_turn and turn != other_turn)


class Turns:
    """The optimizers that have stepped, and the passes of each model that end with several."""

    def __init__(self) -> None:
        """None has stepped yet."""
        self._numbers = weakref.WeakKeyDictionary["Optimizer", int]()
        self._count = 0
        self._latest = 0
        # By model: another one like it, with an optimizer of its own, is trained after it perhaps.
        self._ends = weakref.WeakKeyDictionary["nn.Module", dict["Key", set[int]]]()

    def told_apart(self, call: Call, root: nn.Module) -> Call:
        """A call that begins a pass, with whose turn it is where passes like it have several ends.

        Args:
            call: The call.
            root: The model that the pass is of.
        """
        ends = self._ends.get(root)
        is_shared = ends is not None and len(ends.get(kind_of(call.key), ())) > 1
        return replace(call, turn=self._latest) if is_shared else call

    def ended(self, key: Key, optimizer: Optimizer, root: nn.Module) -> None:
        """An optimizer's step has ended a pass.

        Args:
            key: The key of the pass.
            optimizer: The optimizer.
            root: The model that the pass was of.
        """
        known = self._numbers.get(optimizer)
        if known is None:
            self._count += 1
            known = self._numbers[optimizer] = self._count
        self._latest = known
        self._ends.setdefault(root, {}).setdefault(kind_of(key), set()).add(known)
