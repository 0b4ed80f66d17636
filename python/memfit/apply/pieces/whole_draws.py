"""Random numbers of a piece of a batch, as the whole batch would have drawn them.

Responsible for drawing, wherever a piece draws, for all items of the batch, and for giving the
piece its own. A generator that begins each piece where it stood before the first then gives every
item the numbers that it gets without pieces. Not responsible for the generator's state
(:mod:`memfit.apply.pieces.call`).

That costs a whole draw for each piece, and for as long as it takes the memory of the whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from memfit.tensors.operators import draws_random_numbers, operator_of

_aten = torch.ops.aten

_BERNOULLI = _aten.bernoulli_.float
_IN_PLACE = frozenset(
    {
        _BERNOULLI,
        _aten.exponential_.default,
        _aten.geometric_.default,
        _aten.log_normal_.default,
        _aten.normal_.default,
        _aten.random_.default,
        _aten.random_.to,
        _aten.uniform_.default,
    }
)
_LIKE = frozenset({_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default})
_BY_SIZE = {_aten.rand.default: 0, _aten.randn.default: 0, _aten.randint.default: 1}
"""Ops that make a tensor of a size; the position of that."""

_DROPOUT = _aten.native_dropout.default

DRAWN_WHOLE = frozenset(str(func) for func in {*_IN_PLACE, *_LIKE, *_BY_SIZE, _DROPOUT})
"""Names of the ops that can draw for more items than they are asked for."""


class WholeDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, whatever is drawn is drawn for the whole batch."""

    def __init__(self, draws: Sequence[bool], size: int, start: int, rows: int) -> None:
        """Expect the draws of one piece.

        Args:
            draws: For each op that draws, in order, whether it draws for every item.
            size: Items of the batch.
            start: The first one of the piece.
            rows: How many the piece has.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = iter(draws)
        self._size = size
        self._start = start
        self._rows = rows

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to wrap every call for a compiler that never sees this mode."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op; draw for the whole batch where it draws for every item."""
        kwargs = dict(kwargs) if kwargs else {}
        if not draws_random_numbers(operator_of(func), args, kwargs) or not next(
            self._draws, False
        ):
            return func(*args, **kwargs)
        if func is _DROPOUT:
            return self._dropped(*args, **kwargs)
        if func in _IN_PLACE:
            is_cheap = (
                func is _BERNOULLI and args[0].dtype is torch.float32 and _counts_in_32_bits()
            )
            kind = torch.int32 if is_cheap else args[0].dtype
            drawn = func(room_for(args[0], self._size, kind), *args[1:], **kwargs)
            return args[0].copy_(self._own(drawn))
        if func in _LIKE:
            drawn = func(room_for(args[0], self._size), *args[1:], **kwargs)
        else:
            at = _BY_SIZE[func]
            whole = [self._size, *args[at][1:]]
            drawn = func(*args[:at], whole, *args[at + 1 :], **kwargs)
        return self._own(drawn).clone()

    def _dropped(self, piece: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:  # noqa: FBT001 - as torch has it
        """What fused dropout, as GPUs have it, returns: its result, and what it has kept."""
        kept = self._own(_DROPOUT(room_for(piece, self._size).zero_(), p, train)[1]).clone()
        if train is False:
            return piece.clone(), kept
        return piece * kept * (0.0 if p == 1 else 1 / (1 - p)), kept

    def _own(self, drawn: Tensor) -> Tensor:
        return drawn.narrow(0, self._start, self._rows)


@functools.cache
def _counts_in_32_bits() -> bool:
    """Whether whole numbers of 32 bits are drawn as floats are: those take twice the memory.

    MKL's kernel, which torch uses where it has it, draws whole numbers and converts them.
    """
    with torch.random.fork_rng(devices=()), torch._C._DisableTorchDispatch():
        torch.manual_seed(0)
        floats = torch.empty(256).bernoulli_(0.5)
        torch.manual_seed(0)
        return bool((torch.empty(256, dtype=torch.int32).bernoulli_(0.5) == floats).all())


def room_for(piece: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a batch of which one piece is there, laid out as the piece is.

    Args:
        piece: The piece.
        size: Items of the batch.
        dtype: Type of its elements; ``None`` for the piece's.
    """
    kind = dtype or piece.dtype
    shape, stride = (size, *piece.shape[1:]), piece.stride()
    steps = zip(piece.shape, stride, strict=True)
    is_dense = 1 + sum((length - 1) * step for length, step in steps) == piece.numel()
    if is_dense and stride[0] * piece.shape[0] == piece.numel():
        return torch.empty_strided(shape, stride, dtype=kind, device=piece.device)
    return torch.empty(shape, dtype=kind, device=piece.device)


@contextlib.contextmanager
def beneath(mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a dispatch mode under all that are there: what they see is what the piece asks for.

    Lower still stay those that carry ops out (``carries_out_ops``): what they ask for is their own.

    Args:
        mode: The mode.
    """
    stack = _get_current_dispatch_mode_stack()
    lowest = takewhile(lambda it: getattr(it, "carries_out_ops", False), stack)
    above = _taken_off(sum(1 for _ in lowest))
    try:
        with mode:
            height = _len_torch_dispatch_stack()
            _put_on(above)
            try:
                yield
            finally:
                above = _taken_off(height)
    finally:
        _put_on(above)


def _taken_off(height: int) -> list[Any]:
    taken = []
    while _len_torch_dispatch_stack() > height:
        taken.append(_pop_mode())
    return taken


def _put_on(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
