"""Ops in pieces, where the memory that they take inside is a large part of the budget.

Torch's convolutions on the CPU copy what they read and write into an order of their own: a second
time the input and the output, for the whole batch at once. Normalisation's backward makes its
result twice. Piece by piece it is as much less, in about the same time. Responsible for which ops
run so, and for their results. Not responsible for the batch of a whole model
(:mod:`memfit.run.script.pieces`), which normalisations over the batch forbid.

Items of a batch do not mix in a convolution, nor channels in a normalisation. But torch may choose
another algorithm for fewer of them, and the weights' gradient is summed in another order: the
results are equivalent, not the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.run.script.contexts import Nesting
from memfit.run.script.request import FitRequest

LEAST_ITEMS = 2
"""A batch of one often gets an algorithm of its own."""

_PART = 1 / 32
"""Part of the budget that a piece may take inside."""

_WEIGHTS_PART = 1 / 4
"""Part of the budget that the copies for the weights' gradient may take, for which all pieces would
have to be summed."""

IN_PIECES = "large convolutions and normalisations run in pieces, which may change rounding"
"""What is said at the end where some did."""

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_OF_NORM = torch.ops.aten.native_batch_norm_backward.default
_KINDS = (Tensor, nn.Parameter, nn.Buffer)


class LeanOps:
    """The ops of a script that take much inside."""

    def __init__(self, request: FitRequest) -> None:
        """None has run so.

        Args:
            request: Which plans are allowed.
        """
        options = request.options
        self._may = options.promise != "exact" and "micro_batch" not in options.forbid

    @contextlib.contextmanager
    def in_pieces(self, budget_bytes: int, notes: dict[str, None]) -> Iterator[None]:
        """Run those inside this on pieces that are large for a budget.

        Args:
            budget_bytes: The budget; 0 while nobody knows it, and nothing is done.
            notes: Said at the end; of those that ran so, too.
        """
        if not (self._may and budget_bytes):
            yield
            return
        mode = _InPieces(budget_bytes)
        mode.__enter__()  # type: ignore[no-untyped-call]
        nesting = Nesting()
        try:
            yield
        finally:
            with nesting.cleared():
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if mode.has_cut:
                notes[IN_PIECES] = None


class _InPieces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs large ops in pieces."""

    carries_out_ops = True

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._budget_bytes = budget_bytes
        self.has_cut = False

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _FORWARD and not kwargs:
            return self._forward(args)
        if func is _BACKWARD and not kwargs:
            return self._backward(args)
        if func is _OF_NORM and not kwargs:
            return self._of_norm(args)
        return func(*args, **(kwargs or {}))

    def _forward(self, args: tuple[Any, ...]) -> Tensor:
        batch, weight = args[0], args[1]
        # What it makes is as large as what it reads, as far as channels alone tell.
        channels = weight.shape[1] * args[8] if args[6] else weight.shape[0]
        grown = batch.nbytes * (1 + channels / max(batch.shape[1], 1))
        pieces = self._pieces(batch, int(grown))
        if len(pieces) == 1:
            whole: Tensor = _FORWARD(*args)
            return whole
        self.has_cut = True
        out: Tensor | None = None
        start = 0
        for piece in batch.split(pieces):
            made = _FORWARD(piece, *args[1:])
            out = _like(made, len(batch)) if out is None else out
            out[start : start + len(piece)] = made
            start += len(piece)
        assert out is not None, "there are two pieces at least"
        return out

    def _backward(self, args: tuple[Any, ...]) -> Any:
        gradient, batch = args[0], args[1]
        wants_input, *wants_weights = args[10]
        copies = gradient.nbytes + batch.nbytes
        pieces = self._pieces(batch, copies)
        if len(pieces) == 1:
            return _BACKWARD(*args)
        self.has_cut = True
        of_weights: list[Tensor | None] = [None, None]
        sums = any(wants_weights) and copies > _WEIGHTS_PART * self._budget_bytes
        if any(wants_weights) and not sums:
            of_weights = list(_BACKWARD(*args[:10], [False, *wants_weights])[1:])
        mask = [wants_input, *(sums and wanted for wanted in wants_weights)]
        of_input: Tensor | None = None
        start = 0
        for part, piece in zip(gradient.split(pieces), batch.split(pieces), strict=True):
            if not any(mask):
                break
            made, *others = _BACKWARD(part, piece, *args[2:10], mask)
            if wants_input:
                of_input = _like(made, len(batch)) if of_input is None else of_input
                of_input[start : start + len(piece)] = made
            start += len(piece)
            for place, other in enumerate(others if sums else ()):
                so_far = of_weights[place]
                of_weights[place] = other if so_far is None else so_far.add_(other)
        return of_input, *of_weights

    def _of_norm(self, args: tuple[Any, ...]) -> Any:
        """Of a normalisation, by channels: its gradient's copy, and what it makes twice."""
        gradient, batch, *of_channels = args[:7]
        pieces = self._pieces(batch, 4 * batch.nbytes, batch.shape[1])
        if len(pieces) == 1 or not args[9][0]:
            return _OF_NORM(*args)
        self.has_cut = True
        of_input = torch.empty_like(batch, memory_format=torch.contiguous_format)
        of_weights: list[list[Tensor]] = []
        start = 0
        for size in pieces:
            part = slice(start, start + size)
            cut = [it if it is None or not len(it) else it[part] for it in of_channels]
            inputs = (it[:, part].contiguous() for it in (gradient, batch))
            made, *others = _OF_NORM(*inputs, *cut, *args[7:])
            of_input[:, part] = made
            of_weights.append(others)
            start += size
        joined = zip(*of_weights, strict=True)
        return of_input, *(torch.cat(parts) if parts[0] is not None else None for parts in joined)

    def _pieces(self, batch: Any, copies: int, along: int = 0) -> list[int]:
        """Sizes of pieces; one piece where it is small, or no batch of plain tensors."""
        items = along or len(batch)
        may = type(batch) in _KINDS and batch.device.type == "cpu"
        count = min(int(copies / (_PART * self._budget_bytes)) + 1, items // LEAST_ITEMS)
        if not may or count <= 1:
            return [items]
        size, more = divmod(items, count)
        return [size + 1] * more + [size] * (count - more)


def _like(piece: Tensor, items: int) -> Tensor:
    """Memory for all items in the order that a piece's has."""
    is_last = piece.dim() == 4 and piece.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004
    order = torch.channels_last if is_last and not piece.is_contiguous() else None
    kind = order or torch.contiguous_format
    shape = (items, *piece.shape[1:])
    return torch.empty(shape, dtype=piece.dtype, device=piece.device, memory_format=kind)
