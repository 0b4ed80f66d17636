"""What a forward of inference returns.

Responsible for finding its tensors among the recorded values, and for whether results of pieces of
the batch can be put together as far as one recording or two tell. Which dimension of a result grows
with the batch is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from memfit.capture.record.ledger import Ledger
from memfit.tensors.storage import is_wrapper

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Returned:
    """What a forward returned.

    Attributes:
        values: Its tensors, in order.
        structure: How they lie in it.
        constants: What there is besides, in order; a tensor counts as ``None``.
        refusal: Why it cannot be put together from pieces, as a clause; empty where it may be.
        has_graph: Whether autograd knows how one of its tensors was made.
    """

    values: tuple[int, ...]
    structure: TreeSpec
    constants: tuple[Any, ...]
    refusal: str = ""
    has_graph: bool = False

    @classmethod
    def of(cls, result: Any, ledger: Ledger) -> Returned:
        """Look at what a forward returned.

        Args:
            result: What it returned.
            ledger: The recorder's.
        """
        leaves, structure = tree_flatten(result)
        values: list[int] = []
        for leaf in leaves:
            if isinstance(leaf, _CONSTANTS):
                continue
            plain = isinstance(leaf, Tensor) and not is_wrapper(type(leaf))
            known = None
            if plain and leaf.layout is torch.strided:
                known = ledger.find(leaf)
            if known is None:
                what = "a tensor that no op of it made" if plain else f"a `{type(leaf).__name__}`"
                refusal = f"it returns {what}"
                return cls((), structure, (), refusal)
            values.append(ledger.value(leaf, known))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        has_graph = any(isinstance(it, Tensor) and it.grad_fn is not None for it in leaves)
        return cls(tuple(values), structure, constants, has_graph=has_graph)

    def refusal_beside(self, other: Returned) -> str:
        """Why it cannot be put together, where another batch size was recorded too.

        Args:
            other: What the same forward returned then.
        """
        same = self.structure == other.structure and self.constants == other.constants
        if self.refusal or other.refusal or same:
            return self.refusal or other.refusal
        return "what it returns is of another kind for another batch size"
