"""What a forward of inference returns, put together from what its pieces return.

Responsible for the memory of the whole result, which is there from the first piece on, and for
refusing pieces that return something else than the first. Not responsible for running them
(:mod:`memfit.run.fitted`), nor for a model's call alone (:mod:`memfit.apply.pieces.call`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.apply.pieces.whole_draws import room_for
from memfit.apply.proven_ops import LeftProof


class WholeResult:
    """Collects what the pieces of a batch return."""

    def __init__(self, rows: int, dims: Sequence[int]) -> None:
        """Begin with nothing.

        Args:
            rows: Items of the whole batch.
            dims: For each tensor that is returned, its dimension of items; none: the first of all.
        """
        self._rows = rows
        self._dims = list(dims)
        self._start = 0
        self._leaves: list[Any] = []
        self._structure: TreeSpec | None = None

    def take(self, result: Any, rows: int) -> None:
        """Add what the next piece returned.

        Args:
            result: What it returned.
            rows: Items of the piece.

        Raises:
            LeftProof: It is of another kind than the plan knows, or than the first piece's.
        """
        leaves, structure = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._structure is None:
            self._begin(leaves, structure, tensors, rows)
        self._require_same(leaves, structure, tensors, rows)
        dims = iter(self._dims)
        for whole, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(leaf, Tensor):
                whole.narrow(next(dims), self._start, rows).copy_(leaf)
        self._start += rows

    def result(self) -> Any:
        """The whole result."""
        assert self._structure is not None, "a piece has run"
        return tree_unflatten(self._leaves, self._structure)

    def _begin(
        self, leaves: list[Any], structure: TreeSpec, tensors: list[Tensor], rows: int
    ) -> None:
        self._structure = structure
        self._dims = self._dims or [0] * len(tensors)
        if len(tensors) != len(self._dims):
            raise LeftProof("a piece of its batch returned other tensors than planned")
        dims = iter(self._dims)
        for leaf in leaves:
            known = isinstance(leaf, Tensor)
            self._leaves.append(self._room(leaf, next(dims), rows) if known else leaf)

    def _room(self, piece: Tensor, dim: int, rows: int) -> Tensor:
        if dim >= piece.dim() or piece.shape[dim] != rows:
            raise LeftProof("a piece of its batch returned something without its items")
        if dim == 0:
            return room_for(piece, self._rows)
        shape = list(piece.shape)
        shape[dim] = self._rows
        return torch.empty(shape, dtype=piece.dtype, device=piece.device)

    def _require_same(
        self, leaves: list[Any], structure: TreeSpec, tensors: list[Tensor], rows: int
    ) -> None:
        same = structure == self._structure and len(tensors) == len(self._dims)
        dims = iter(self._dims)
        for whole, leaf in zip(self._leaves, leaves, strict=True) if same else ():
            if not isinstance(leaf, Tensor):
                same = same and not isinstance(whole, Tensor) and whole == leaf
                continue
            shape = list(leaf.shape)
            dim = next(dims)
            same = same and dim < len(shape) and shape[dim] == rows
            if same:
                shape[dim] = self._rows
                same = isinstance(whole, Tensor) and list(whole.shape) == shape
                same = same and whole.dtype is leaf.dtype
        if not same:
            raise LeftProof("a piece of its batch returned something else than the first")
