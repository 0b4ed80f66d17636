"""Which saved tensors lie in which memory, while an op may still write there.

Responsible for telling tokens of writes that torch does not count, as through ``.data``: backward
reads what such a write left. Not responsible for what a token gives back
(:mod:`memfit.apply.remat.replay`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.apply.remat.records import alias_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memfit.apply.remat.records import Token


class SavedMemory:
    """Tokens by the storage of what they stand for, as long as there is one.

    torch counts a write after the op's mode has returned: whether it was counted is known later.
    """

    def __init__(self) -> None:
        """None is known."""
        self._tokens: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Token]]]] = {}
        self._writes: list[tuple[Token, Tensor]] = []

    def __bool__(self) -> bool:
        """Whether any memory that somebody holds was saved."""
        return bool(self._tokens)

    def add(self, tensor: Tensor, token: Token) -> None:
        """Know a token.

        Args:
            tensor: What autograd saves.
            token: What it holds instead.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        tokens = self._tokens

        def forget(reference: weakref.ref[Any]) -> None:
            if tokens.get(key, (None,))[0] is reference:
                del tokens[key]

        if key not in tokens:
            tokens[key] = (weakref.ref(storage, forget), [])
        tokens[key][1].append(weakref.ref(token))

    def written(self, targets: Iterable[Tensor]) -> None:
        """Take note of what an op is about to write to.

        Args:
            targets: What it says that it writes to.
        """
        for tensor in targets:
            if tensor.layout is not torch.strided:
                continue
            _, tokens = self._tokens.get(tensor.untyped_storage()._cdata, (None, ()))
            self._writes += [
                (token, alias_of(tensor))
                for reference in tokens
                if (token := reference()) is not None
            ]

    def settle(self) -> None:
        """Tell tokens of the writes of ops that have ended."""
        for token, alias in self._writes:
            token.is_written_to(alias)
        self._writes.clear()

    def clear(self) -> None:
        """Know none."""
        self._tokens.clear()
