"""Tensors that a script trains by hand: in no module that it calls, and of no optimizer.

A network of plain functions has no model to call and nothing that steps, only `backward()` and
lines that change its weights. Responsible for finding those weights: what two backwards in a row
compute gradients of. Inputs that are differentiated, too, are others each time. Not responsible for
where steps begin (:mod:`memfit.run.script.parameter_uses`) nor for which backwards are looked at
(:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from memfit.run.script.roots import Together
from memfit.tensors.storage import graph_of, is_leaf

ARE_OTHERS = (
    "the script runs unplanned: what its backwards compute gradients of is in no module, and is "
    "another tensor each time"
)
_MANY = 3
"""Backwards of others in a row, after which it is no change of what is trained."""


class TrainedByHand:
    """What is trained by hand, from its second backward on."""

    def __init__(self) -> None:
        """Know of no backward yet."""
        self._others = 0
        self._before: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._root: Together | None = None
        self._own: frozenset[int] = frozenset()

    @property
    def is_found(self) -> bool:
        """Whether anything was found."""
        return self._root is not None

    @property
    def are_others(self) -> bool:
        """Whether several backwards in a row had nothing in common."""
        return self._others >= _MANY

    def of(self, used: Tensor) -> Together | None:
        """What the use of a tensor is of; ``None`` where it is not trained by hand.

        Args:
            used: The tensor.
        """
        return self._root if id(used) in self._own else None

    def is_again(self, results: Sequence[Tensor]) -> bool:
        """Whether a backward is of what is trained by hand, as a second one in a step.

        Args:
            results: What it begins with.
        """
        return any(id(leaf) in self._own for leaf in _leaves(results))

    def differentiated(self, results: Sequence[Tensor]) -> None:
        """A backward is about to run, of no model's pass.

        Args:
            results: What it begins with.
        """
        leaves = {id(leaf): leaf for leaf in _leaves(results)}
        again = {of: leaf for of, leaf in leaves.items() if self._before.get(of) is leaf}
        self._before.clear()
        self._before.update(leaves)
        if again and again.keys() != self._own:
            self._root = Together((), again.values())
        elif not again:
            self._root = None  # what was trained before may be gone
        self._own = frozenset(again)
        self._others = 0 if again else self._others + 1


def _leaves(results: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors whose gradients a backward computes."""
    waiting: list[Any] = [graph_of(it) for it in results]
    yield from (it for it in results if it.requires_grad and is_leaf(it))
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        waiting.extend(following for following, _ in node.next_functions)
