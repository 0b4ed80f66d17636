"""When each allocation lived.

Responsible for giving every storage an allocation id, for the ranges in which something other than
a saved tensor holds it, for its in-place version, and for interning values. Not responsible for
ops, for saved tensors or for what an allocation is for.

A storage is known by its address, which is reused after its death: the weak reference on the
storage drops the key at once. Several storages may stand for one allocation, one after the other:
what autograd unpacks is a fresh storage that carries the id of the one it stands for.

```text
position        0    1    2    3    4    5    6
first storage        [---------)                     made by op 1, last reference gone before op 3
fresh storage                            [----)      unpacked before op 5, gone before op 6
natural ranges       [1,3)               [5,6)       both of one allocation
```
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

UntypedStorage = torch.UntypedStorage


class _StorageRef(weakref.ref[Any]):
    """Weak reference to a storage that knows what died."""

    __slots__ = ("allocation", "key", "takes_memory")
    key: int
    allocation: int
    takes_memory: bool


class Ledger:
    """Allocations, their lives and their values, in order of first appearance.

    Attributes:
        now: The current position: index of the next op to be recorded.
        bytes: Size of each allocation.
        device: Device of each allocation.
        producer: Op that created each allocation; ``None`` for what existed before the step.
        version: In-place writes each allocation has seen.
        static: Whether each allocation existed before the step.
        found: Addresses of the storages of those that did.
        values: One tuple ``(allocation, version, offset, shape, stride, dtype)`` per value.
        value_bytes: Distinct bytes each value covers.
        came_meanwhile: Whether a storage that no op made has come to be since the step began, as
            those do that hooks of others hand out.
    """

    def __init__(self) -> None:
        """Create an empty ledger at position 0."""
        self.now = 0
        self.bytes: list[int] = []
        self.device: list[str] = []
        self.producer: list[int | None] = []
        self.version: list[int] = []
        self.static: list[bool] = []
        self.found: set[int] = set()
        self.values: list[tuple[Any, ...]] = []
        self.value_bytes: list[int] = []
        self.closing = False
        self.came_meanwhile: Callable[[UntypedStorage], bool] = lambda _: False
        self._ranges: list[list[list[int]]] = []
        self._opened: list[int] = []
        self._holders: list[int] = []
        self._alive: dict[int, int] = {}
        self._refs: dict[int, _StorageRef] = {}
        self._value_ids: dict[tuple[Any, ...], int] = {}
        self._on_death: list[Any] = []

    def on_death(self, callback: Any) -> None:
        """Call ``callback(allocation)`` whenever the last storage of an allocation dies."""
        self._on_death.append(callback)

    def find(self, tensor: Tensor) -> int | None:
        """The allocation behind a tensor, if it is known."""
        return self._alive.get(tensor.untyped_storage()._cdata)

    def is_held(self, allocation: int) -> bool:
        """Whether a storage holds an allocation, or something that it was lent to."""
        return self._holders[allocation] > 0

    def holds(self, storage: UntypedStorage) -> bool:
        """Whether a storage stands for an allocation."""
        return storage._cdata in self._alive

    def seen(self, tensor: Tensor, producer: int | None = None) -> int:
        """The allocation behind a tensor, registered now if it is new.

        Args:
            tensor: Any tensor with a storage.
            producer: The op that made it; ``None`` for what existed before the step.

        Returns:
            The allocation id.
        """
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found is not None:
            return found
        allocation = len(self.bytes)
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        self.bytes.append(storage.nbytes())
        self.device.append(str(device))
        self.producer.append(producer)
        self.version.append(0)
        existed = producer is None and not self.came_meanwhile(storage)
        self.static.append(existed)
        if existed:
            self.found.add(storage._cdata)
        self._ranges.append([])
        self._opened.append(0)
        self._holders.append(0)
        start = 0 if existed else self.now if producer is None else producer
        self._hold(storage, allocation, start)
        return allocation

    def stand_in(
        self, storage: UntypedStorage, allocation: int, *, takes_memory: bool = True
    ) -> None:
        """Let a fresh storage carry the id of an allocation whose own storage may be gone.

        Args:
            storage: The fresh storage.
            allocation: What it stands for.
            takes_memory: Whether the allocation lives while the storage does.
        """
        self._hold(storage, allocation, self.now, takes_memory=takes_memory)

    def lend(self, allocation: int) -> None:
        """Have an allocation live on, with or without a storage, until it is given back.

        Args:
            allocation: The allocation.
        """
        self._begin(allocation, self.now)

    def give_back(self, allocation: int) -> None:
        """What :meth:`lend` said is over.

        Args:
            allocation: The allocation.
        """
        if not self.closing:
            self._end(allocation)

    def resized(self, tensor: Tensor, allocation: int) -> None:
        """Take note that an op may have changed the size of a storage; the largest size counts."""
        self.bytes[allocation] = max(self.bytes[allocation], tensor.untyped_storage().nbytes())

    def value(self, tensor: Tensor, allocation: int) -> int:
        """The id of a tensor as it is now: its allocation, at its version, through its view.

        Args:
            tensor: A strided tensor.
            allocation: Its allocation.

        Returns:
            The value id.
        """
        key = (
            allocation,
            self.version[allocation],
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        found = self._value_ids.get(key)
        if found is None:
            found = self._value_ids[key] = len(self.values)
            self.values.append(key)
            elements = 1
            for size, stride in zip(key[3], key[4], strict=True):
                if stride != 0:
                    elements *= size
            if 0 in key[3]:
                elements = 0
            self.value_bytes.append(elements * tensor.itemsize)
        return found

    def written_value(self, value: int) -> int:
        """The id of what a value's view shows since its allocation was last written to.

        Args:
            value: A value of an earlier version.
        """
        allocation, _, *view = self.values[value]
        key = (allocation, self.version[allocation], *view)
        found = self._value_ids.get(key)
        if found is None:
            found = self._value_ids[key] = len(self.values)
            self.values.append(key)
            self.value_bytes.append(self.value_bytes[value])
        return found

    def give_elements(self, value: int) -> None:
        """Let a value that a fake made without elements have all that its allocation holds.

        Args:
            value: The value.
        """
        allocation, version, offset, shape, _, dtype = self.values[value]
        count = self.bytes[allocation] // dtype.itemsize
        if 0 in shape and count > 0:
            self.values[value] = (allocation, version, offset, (count,), (1,), dtype)
            self.value_bytes[value] = count * dtype.itemsize

    def made_and_held(self, but: set[int]) -> list[weakref.ref[Any]]:
        """Storages, weakly, that ops of the step made and something still holds.

        Args:
            but: Allocations to leave out.
        """
        live = self._refs.values()
        held = (r for r in live if not self.static[r.allocation] and r.allocation not in but)
        return [weakref.ref(storage) for ref in held if (storage := ref()) is not None]

    def found_and_held(self, but: set[int]) -> list[weakref.ref[Any]]:
        """Storages, weakly, that were there before the step and something still holds.

        Args:
            but: Allocations to leave out.
        """
        live = self._refs.values()
        held = (r for r in live if self.static[r.allocation] and r.allocation not in but)
        return [weakref.ref(storage) for ref in held if (storage := ref()) is not None]

    def found_and_gone_bytes(self, but: set[int]) -> int:
        """Bytes that were there before the step and that nothing holds any more.

        Args:
            but: Allocations to leave out.
        """
        gone = (i for i, held in enumerate(self._holders) if held == 0 and self.static[i])
        return sum(self.bytes[i] for i in gone if i not in but)

    def take_no_memory(self, is_counted: Callable[[UntypedStorage], bool]) -> None:
        """Let what was there before, in memory that does not count, have no bytes.

        Args:
            is_counted: Whether the memory of a storage counts.
        """
        for ref in list(self._refs.values()):
            storage = ref()
            if storage is not None and self.static[ref.allocation] and not is_counted(storage):
                self.bytes[ref.allocation] = 0

    def close(self) -> None:
        """End the step: whatever is still held lives to the end."""
        self.closing = True
        for allocation, holders in enumerate(self._holders):
            if holders > 0:
                self._end_range(allocation)
        self._refs.clear()
        self._alive.clear()

    def ranges(self, allocation: int) -> list[list[int]]:
        """Natural ranges ``[start, end)`` of an allocation: sorted, disjoint, none empty."""
        return self._ranges[allocation]

    def _hold(
        self, storage: UntypedStorage, allocation: int, start: int, *, takes_memory: bool = True
    ) -> None:
        key = storage._cdata
        ref = _StorageRef(storage, self._died)
        ref.key = key
        ref.allocation = allocation
        ref.takes_memory = takes_memory
        self._alive[key] = allocation
        self._refs[key] = ref
        if takes_memory:
            self._begin(allocation, start)

    def _died(self, ref: Any) -> None:
        if self.closing:
            return
        del self._alive[ref.key]
        del self._refs[ref.key]
        if ref.takes_memory:
            self._end(ref.allocation)

    def _begin(self, allocation: int, start: int) -> None:
        """One more holds an allocation."""
        if self._holders[allocation] == 0:
            self._opened[allocation] = start
        self._holders[allocation] += 1

    def _end(self, allocation: int) -> None:
        """One less does."""
        self._holders[allocation] -= 1
        if self._holders[allocation] == 0:
            self._end_range(allocation)
            for callback in self._on_death:
                callback(allocation)

    def _end_range(self, allocation: int) -> None:
        start, end = self._opened[allocation], self.now
        if start >= end:
            return
        ranges = self._ranges[allocation]
        if ranges and ranges[-1][1] >= start:
            ranges[-1][1] = end
        else:
            ranges.append([start, end])
