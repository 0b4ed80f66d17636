"""Real values beside fake tensors, where they follow from the batch alone.

Responsible for answering a model that asks for a value (``if mask.all():``, ``.item()``) while the
step runs on fakes. What is computed from the batch, module buffers and constants only, with nothing
random and no parameter in it, is computed for real as well, if it is small. Not responsible for
values that depend on parameters: nobody knows these without running the step.

A shadow belongs to a storage, so views need no work and a write through one view is seen through
all. A shadow that is the user's own storage is copied before the first write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memfit.capture.ledger import Ledger
from memfit.capture.schema import OpFacts

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


class Shadows:
    """Real storages by allocation."""

    def __init__(self, ledger: Ledger) -> None:
        """Create an empty table.

        Args:
            ledger: Tells which allocation a tensor belongs to, and when it dies.
        """
        self._ledger = ledger
        self._storages: dict[int, Any] = {}
        self._borrowed: set[int] = set()
        ledger.on_death(self.drop)

    def lend(self, allocation: int, real: Tensor) -> None:
        """Use the storage of a real tensor, which memfit must not write to, as a shadow."""
        if real.layout is torch.strided and real.device.type == "cpu":
            self._storages[allocation] = real.untyped_storage()
            self._borrowed.add(allocation)

    def own(self, allocation: int, real: Tensor) -> None:
        """Use the storage of a real tensor that nobody else has."""
        self._storages[allocation] = real.untyped_storage()

    def drop(self, allocation: int) -> None:
        """Forget the values of an allocation."""
        self._storages.pop(allocation, None)
        self._borrowed.discard(allocation)

    def knows(self, allocations: list[int]) -> bool:
        """Whether every allocation has a shadow, and there is at least one."""
        storages = self._storages
        return bool(allocations) and all(a in storages for a in allocations)

    def real(self, tensor: Tensor) -> Tensor:
        """The real tensor behind a fake one.

        Args:
            tensor: A fake whose allocation has a shadow.

        Returns:
            A view of the shadow with the fake's shape, strides and element type.
        """
        allocation = self._ledger.find(tensor)
        storage = self._storages[allocation]  # type: ignore[index]
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            )

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the shadows of its arguments.

        Args:
            func: The op.
            args: Its positional arguments, fakes with shadows among them.
            kwargs: Its keyword arguments.

        Returns:
            The real result.
        """
        arguments = tree_map(self._real_argument, (args, kwargs))
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return func(*arguments[0], **arguments[1])

    def follow(
        self,
        func: Any,
        facts: OpFacts,
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
            facts: Facts about it.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            read: Allocations it read.
            written: Allocations it wrote to.
            fresh: New allocations with the fake that first showed them.
            outputs: Every tensor it returned.
        """
        if facts.random or not (written or fresh):
            for allocation in written:
                self.drop(allocation)
            return
        if written:
            if self.knows(read):
                self._write(func, args, kwargs, written)
            else:
                for allocation in written:
                    self.drop(allocation)
            return
        if any(self._ledger.bytes[a] > LARGEST_RESULT_BYTES for a, _ in fresh):
            return
        packet = func.overloadpacket.__name__
        if packet in _FILLS:
            for allocation, fake in fresh:
                self._fill(allocation, fake, _FILLS[packet])
        elif self.knows(read) or (not read and packet in _FACTORIES):
            self._compute_fresh(func, args, kwargs, fresh, outputs)

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[int]
    ) -> None:
        for allocation in written:
            if allocation in self._borrowed:
                self._borrowed.discard(allocation)
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    self._storages[allocation] = self._storages[allocation].clone()
        try:
            self.compute(func, args, kwargs)
        except RuntimeError:
            for allocation in written:
                self.drop(allocation)

    def _fill(self, allocation: int, fake: Tensor, value: float) -> None:
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            real = torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype)
            real.fill_(value)
        self.own(allocation, real)

    def _compute_fresh(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fresh: list[tuple[int, Tensor]],
        outputs: list[Tensor],
    ) -> None:
        try:
            result = self.compute(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            return
        results = [result] if isinstance(result, Tensor) else list(result)
        if len(results) != len(outputs):
            return
        for allocation, fake in fresh:
            for real, shown in zip(results, outputs, strict=True):
                if shown is fake and isinstance(real, Tensor):
                    same = real.shape == fake.shape and real.stride() == fake.stride()
                    if same and real.storage_offset() == fake.storage_offset():
                        self.own(allocation, real)

    def _real_argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.real(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return leaf
