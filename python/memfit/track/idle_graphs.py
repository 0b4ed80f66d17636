"""Graphs that the backward under way does not run through.

Such a graph keeps what it saved whatever that backward does: mostly it was made where none runs, as
in a validation with gradients on. Responsible for telling these graphs apart. Not responsible for
what they hold (:mod:`memfit.track.graphs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from memfit.tensors.storage import graph_of

_OF_LEAF = "AccumulateGrad"
"""The node of a leaf, which all graphs share that use it."""


class IdleGraphs:
    """Which graphs a backward does not run through; every node is visited once."""

    def __init__(self, roots: Iterable[Tensor], begin: int | None = None) -> None:
        """Visit what it runs through.

        Args:
            roots: What it was asked to differentiate; nothing is idle where no backward runs.
            begin: The number of the first node made since it began; ``None`` where there is none.
                What a checkpoint or a hook makes in a backward, another backward may run through.
        """
        self._begin = begin
        self._is_idle: dict[int, bool] = {}
        self._nodes: list[Any] = []  # one that is let go of may give its number to another
        for root in roots:
            self._visit(graph_of(root))
        for number in self._is_idle:
            self._is_idle[number] = False

    def has(self, root: Any) -> bool:
        """Whether a graph is idle: no node of it is one that the backward runs through.

        Args:
            root: Its first node.
        """
        if not self._nodes or (self._begin is not None and root._sequence_nr() >= self._begin):
            return False
        known = self._is_idle.get(id(root))
        if known is not None:
            return known
        begin = len(self._nodes)
        is_idle = self._visit(root)
        for node in self._nodes[begin:]:
            self._is_idle[id(node)] = is_idle
        return is_idle

    def _visit(self, root: Any) -> bool:
        """Visit what was not visited; whether all that was visited before is idle."""
        is_idle, waiting = True, [root]
        while waiting:
            node = waiting.pop()
            if node is None or type(node).__name__ == _OF_LEAF:
                continue
            known = self._is_idle.get(id(node))
            if known is not None:
                is_idle &= known
                continue
            self._is_idle[id(node)] = True
            self._nodes.append(node)
            waiting.extend(following for following, _ in node.next_functions)
        return is_idle
