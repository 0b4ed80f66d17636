"""Whether anything can still be differentiated through what the models of a pass returned.

A script may call a model with gradients on and want none: a policy that acts, a generator whose
images are detached. Responsible for seeing that. Not responsible for what becomes of the pass
(:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.tensors.storage import graph_of

_KEY = "memfit"


class _Mark:
    """Lives as long as the node of a graph that it is attached to."""

    __slots__ = ("__weakref__",)


class Wanted:
    """What the calls of one pass returned."""

    def __init__(self) -> None:
        """Nothing has been returned yet."""
        self._marks: list[weakref.ref[_Mark]] = []

    def returned(self, result: Any) -> None:
        """A model has returned.

        Args:
            result: What it returned.
        """
        with torch._C.DisableTorchFunction():  # what stands for logits would make them
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._mark(leaf)

    def _mark(self, leaf: torch.Tensor) -> None:
        # What is written to a view replaces the view's node, and leaves that of its base.
        base = leaf._base if leaf._is_view() else None
        node = (None if base is None else graph_of(base)) or graph_of(leaf)
        if node is not None:
            mark = node.metadata.setdefault(_KEY, _Mark())
            self._marks.append(weakref.ref(mark))

    def is_nothing(self) -> bool:
        """Whether every graph that was returned is gone; not where none was seen."""
        return bool(self._marks) and all(mark() is None for mark in self._marks)
