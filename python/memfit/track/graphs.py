"""What autograd's graphs hold.

Responsible for the tensors that a graph keeps for backward, without unpacking one: a hook of the
program's would run. Not responsible for whose graph it is (:mod:`memfit.track.reach`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_RAW = "_raw_saved_"

_OF_AUTOCAST = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Graphs:
    """The graphs seen in one look; every node is visited once.

    Attributes:
        nodes: The nodes, by number: one that is let go of may give its number to another.
        is_complete: Whether everything that they save could be seen.
    """

    nodes: dict[int, Any] = field(default_factory=dict)
    is_complete: bool = True
    _saves: dict[type, tuple[str, ...]] = field(default_factory=dict)

    def of(self, root: Any) -> Iterator[tuple[object, bool]]:
        """What is saved behind a node that was not visited before.

        Args:
            root: A ``grad_fn``.

        Yields:
            A tensor, or what a hook has made of one, and whether it is a parameter in another
            precision, as autocast makes and keeps it: in half of its bytes.
        """
        # A look may come where this node lets go of what it saved, as in the callback of a weak
        # reference: a tensor on its way out must not be held.
        running = torch._C._current_autograd_node()
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in self.nodes:
                continue
            self.nodes[id(node)] = node
            for value in self._saved(node) if node is not running else ():
                yield value, isinstance(value, Tensor) and _is_cast_parameter(value)
            waiting.extend(following for following, _ in node.next_functions)

    def _saved(self, node: Any) -> Iterator[object]:
        kind = type(node)
        names = self._saves.get(kind)
        if names is None:
            names = tuple(name for name in dir(kind) if name.startswith(_RAW))
            self._saves[kind] = names
        for name in names:
            try:
                saved = getattr(node, name)
            except RuntimeError:  # backward has freed it
                continue
            for one in saved if isinstance(saved, tuple | list) else (saved,):
                yield self._value(one)
        if names == (_RAW + "tensors",):  # a function of Python's: what hangs on its `ctx`
            yield from gc.get_referents(node)

    def _value(self, saved: Any) -> object:
        try:
            # Not `unpack`, which runs hooks and counts as a use.
            return saved.data if saved is not None else None
        except (AttributeError, RuntimeError):
            self.is_complete = False
            return None


def _is_cast_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter in a precision of autocast's, perhaps transposed."""
    if tensor.dtype not in _OF_AUTOCAST:
        return False  # as the sum of a parameter in double precision keeps it
    node = tensor.grad_fn
    for _ in range(3):
        if node is None:
            return False
        if node.name() == "ToCopyBackward0":
            leaf: Any = node.next_functions[0][0]
            return leaf is not None and type(leaf).__name__ == "AccumulateGrad"
        if node.name() not in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
            return False
        node = node.next_functions[0][0]
    return False
