"""Real values beside fake tensors, where they follow from the batch alone.

Responsible for answering a model that asks for a value (``if mask.all():``, ``.item()``) while the
step runs on fakes. What is computed from the batch, module buffers and constants only, with nothing
random and no parameter in it, can be computed for real as well, if it is small. Not responsible for
values that depend on parameters: nobody knows these without running the step.

A shadow belongs to a storage, so views need no work and a write through one view is seen through
all. Nothing is computed before somebody asks: ops on shadows are put on a list, and the first
question runs the list in order. A shadow that is the user's own storage is copied before the first
write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memfit.capture.record.ledger import Ledger
from memfit.tensors.operators import Operator

LARGEST_RESULT_BYTES = 4 << 20
"""Results above this size get no shadow; a batch tensor of any size has one."""

_FILLS: dict[str, float] = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "empty": 0,
    "empty_like": 0,
    "empty_strided": 0,
    "new_empty": 0,
    "new_empty_strided": 0,
}
"""Factories whose result follows from its shape; fresh memory is taken to be zero."""

_FACTORIES = frozenset({"arange", "full", "scalar_tensor", "linspace", "logspace", "eye"})
"""Factories without tensor arguments that are computed by running them."""


class UnknownValueError(LookupError):
    """A value that was thought to follow from the batch could not be computed."""


@dataclass(slots=True, eq=False)
class _Shadow:
    """The real storage of an allocation, once it is there.

    Attributes:
        storage: The storage, on the CPU; ``None`` before it was computed, or when that failed.
        borrowed: Whether it belongs to the user.
        elsewhere: The user's storage on a GPU, which is copied when its values are asked for.
    """

    storage: Any = None
    borrowed: bool = False
    elsewhere: Any = None

    def bring(self) -> Any:
        """The storage on the CPU; ``None`` where there is none."""
        if self.elsewhere is not None:
            self.storage, self.elsewhere = self.elsewhere.cpu(), None
        return self.storage


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of an op that waits: a shadow, seen through a view."""

    shadow: _Shadow
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def real(self) -> Tensor:
        storage = self.shadow.bring()
        if storage is None:
            raise UnknownValueError
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An op that waits to be run on shadows.

    Attributes:
        func: The op, or ``None`` to fill the results with a value.
        args: Positional arguments with views for tensors; the value of a fill.
        kwargs: Keyword arguments, likewise.
        written: Shadows the op writes to in place.
        results: What the fakes say of each tensor returned; ``None`` where it is no new shadow.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[_Shadow, ...]
    results: tuple[_View | None, ...]


class Shadows:
    """Real storages by allocation."""

    def __init__(self, ledger: Ledger) -> None:
        """Create an empty table.

        Args:
            ledger: Tells which allocation a tensor belongs to, and when it dies.
        """
        self._ledger = ledger
        self._table: dict[int, _Shadow] = {}
        self._waiting: list[_Waiting] = []
        ledger.on_death(self.drop)

    def lend(self, allocation: int, real: Tensor) -> None:
        """Use the storage of a real tensor, which memfit must not write to, as a shadow."""
        if real.layout is not torch.strided:
            return
        if real.device.type == "cpu":
            self._table[allocation] = _Shadow(real.untyped_storage(), borrowed=True)
        elif real.device.type == "cuda":
            self._table[allocation] = _Shadow(elsewhere=real.untyped_storage())

    def own(self, allocation: int, real: Tensor) -> None:
        """Use the storage of a real tensor that nobody else writes to."""
        self._table[allocation] = _Shadow(real.untyped_storage())

    def drop(self, allocation: int) -> None:
        """Forget the values of an allocation."""
        self._table.pop(allocation, None)

    def close(self) -> None:
        """Let go of all values: the step is over, whatever holds the table."""
        self._table.clear()
        self._waiting.clear()

    def knows(self, allocations: list[int]) -> bool:
        """Whether every allocation has a shadow, and there is at least one."""
        table = self._table
        return bool(allocations) and all(allocation in table for allocation in allocations)

    def real(self, tensor: Tensor) -> Tensor:
        """The real tensor behind a fake one.

        Args:
            tensor: A fake whose allocation has a shadow.

        Returns:
            A view of the shadow with the fake's shape, strides and element type.

        Raises:
            UnknownValueError: The value could not be computed.
        """
        view = self._view(tensor)
        with torch._C._DisableTorchDispatch():
            self._run_waiting()
            return view.real()

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the shadows of its arguments.

        Args:
            func: The op.
            args: Its positional arguments, fakes with shadows among them.
            kwargs: Its keyword arguments.

        Returns:
            The real result.

        Raises:
            UnknownValueError: The value of an argument could not be computed.
        """
        views = tree_map(self._argument, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            self._run_waiting()
            reals = tree_map(_real_argument, views)
            return func(*reals[0], **reals[1])

    def follow(
        self,
        func: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: list[int],
        written: list[int],
        fresh: list[tuple[int, Tensor]],
        outputs: list[Tensor],
    ) -> None:
        """Keep the table right after an op has run on fakes.

        Args:
            func: The op.
            operator: It.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            read: Allocations it read.
            written: Allocations it wrote to.
            fresh: New allocations with the fake that first showed them.
            outputs: Every tensor it returned.
        """
        packet = func.overloadpacket.__name__
        fill = not written and packet in _FILLS
        computed = fill or self.knows(read) or (not read and packet in _FACTORIES)
        small = all(self._ledger.bytes[a] <= LARGEST_RESULT_BYTES for a, _ in fresh)
        if operator.random or not computed or not small:
            for allocation in written:
                self.drop(allocation)
            return
        # Arguments are described before the results enter the table: they are what it was.
        described = ((_FILLS[packet],), {}) if fill else tree_map(self._argument, (args, kwargs))
        targets = tuple(self._table[allocation] for allocation in written)
        for allocation, _ in fresh:
            self._table[allocation] = _Shadow()
        news = {id(fake) for _, fake in fresh}
        self._waiting.append(
            _Waiting(
                func=None if fill else func,
                args=described[0],
                kwargs=described[1],
                written=targets,
                results=tuple(self._view(o) if id(o) in news else None for o in outputs),
            )
        )

    def _run_waiting(self) -> None:
        """Run what waits, in order; what cannot be run leaves its results unknown."""
        waiting, self._waiting = self._waiting, []
        for op in waiting:
            try:
                _run(op)
            except (RuntimeError, NotImplementedError, LookupError, TypeError, ValueError):
                for shadow in op.written:
                    shadow.storage = shadow.elsewhere = None

    def _view(self, tensor: Tensor) -> _View:
        allocation = self._ledger.find(tensor)
        shadow = self._table.get(-1 if allocation is None else allocation)
        if shadow is None:
            raise UnknownValueError
        offset = int(tensor.storage_offset())
        return _View(shadow, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def _argument(self, leaf: Any) -> Any:
        return self._view(leaf) if isinstance(leaf, Tensor) else leaf


def _run(op: _Waiting) -> None:
    """Run one op that waited, and give its results to the shadows that stand for them."""
    if op.func is None:
        for view in op.results:
            if view is not None:
                real = torch.empty_strided(view.shape, view.stride, dtype=view.dtype)
                view.shadow.storage = real.fill_(op.args[0]).untyped_storage()
        return
    for shadow in op.written:
        if shadow.borrowed and shadow.storage is not None:
            shadow.storage = shadow.storage.clone()
            shadow.borrowed = False
    args, kwargs = tree_map(_real_argument, (op.args, op.kwargs))
    result = op.func(*args, **kwargs)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    if len(results) != len(op.results):
        return
    for view, real in zip(op.results, results, strict=True):
        if view is not None and isinstance(real, Tensor):
            laid_out = (tuple(real.shape), real.stride(), real.storage_offset())
            if laid_out == (view.shape, view.stride, view.offset):
                view.shadow.storage = real.untyped_storage()


def _real_argument(leaf: Any) -> Any:
    if isinstance(leaf, _View):
        return leaf.real()
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf
