"""Allocations of a GPU in pinned memory of the host, and through it on a disk.

Responsible for pinned memory of exactly the size asked for (torch's own allocator rounds up to a
power of two), for using it again, and for the order of copies, which run beside the computation.
Not responsible for when an allocation goes or comes (:mod:`memfit.apply.offload.activations`).

Everything that calls CUDA is in :mod:`memfit.apply.offload.cuda_copies`; the tiers are plain logic
over :class:`Copies` and are tested with copies on the CPU.

Why no memory is used too early: the allocator hands a block that is freed to later work of the
stream it was made on. So a source is let go only after that stream was told to wait for the copy
out of it; and a copy into a new block waits for that stream first, while the stream waits for the
copy before anyone reads. Host memory is used again by a copy of the same stream, which comes later,
or after the host has waited for the copy that used it last.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memfit.errors import OffloadError

if TYPE_CHECKING:
    from torch import Tensor

    from memfit._native import Store, StoredBlock


class HostMemory(Protocol):
    """Host memory that the device copies to and from directly."""

    @property
    def bytes(self) -> Tensor:
        """All of it; must not outlive this."""


class Copies(Protocol):
    """Copies between a device and the host, in the order they are asked for."""

    def refusal(self, device: torch.device) -> str | None:
        """Why ``device`` is none to copy from; ``None`` when it is one."""

    def pin(self, size_bytes: int) -> HostMemory:
        """Host memory of exactly this size.

        Raises:
            OffloadError: There is no more.
        """

    def begin(self, target: Tensor, source: Tensor) -> Any:
        """Begin to copy bytes, after all that the device has been told to do; returns its end."""

    def order_after(self, end: Any) -> None:
        """Let all that the device is told from here on come after ``end``."""

    def is_over(self, end: Any) -> bool:
        """Whether ``end`` has come."""

    def wait(self, end: Any) -> None:
        """Wait for ``end`` on the host."""


@dataclass(slots=True)
class Staging:
    """Host memory in use.

    Attributes:
        memory: The memory.
        end: End of the last copy that used it; ``None`` before the first.
    """

    memory: HostMemory
    end: Any = None


@dataclass(slots=True)
class Pool:
    """Pinned memory that waits to be used again: pinning is slow, and sizes repeat every step.

    Attributes:
        copies: Pins more.
    """

    copies: Copies
    _free: dict[int, list[Staging]] = field(default_factory=dict)

    def take(self, size_bytes: int) -> Staging:
        """Memory of exactly this size; copies that use it may not have ended."""
        free = self._free.get(size_bytes)
        return free.pop() if free else Staging(self.copies.pin(size_bytes))

    def give_back(self, staging: Staging) -> None:
        """Let it be used again."""
        self._free.setdefault(staging.memory.bytes.nbytes, []).append(staging)

    def close(self) -> None:
        """Unpin it all, after the copies that use it."""
        for free in self._free.values():
            for staging in free:
                if staging.end is not None:
                    self.copies.wait(staging.end)
        self._free.clear()


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor`` as bytes."""
    with torch._C._DisableTorchDispatch():
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return view.set_(tensor.untyped_storage())


@dataclass(slots=True)
class Count:
    """Bytes that went out and came back, and what the host waited."""

    written: int = 0
    read: int = 0
    seconds_waited: float = 0.0


class PinnedTier:
    """The host's memory, for devices that have one of their own.

    Attributes:
        folder: Empty: it has no files.
    """

    folder = ""

    def __init__(self, copies: Copies) -> None:
        """Create it without any memory.

        Args:
            copies: Between the device and the host.
        """
        self.count = Count()
        self._copies = copies
        self._pool = Pool(copies)

    def refusal(self, device: torch.device) -> str | None:
        """Why allocations on ``device`` cannot go here; ``None`` when they can."""
        return self._copies.refusal(device)

    def send(self, source: Tensor) -> PinnedParcel:
        """Begin to copy the storage of ``source``."""
        data = bytes_of(source)
        self.count.written += data.nbytes
        return PinnedParcel(data, self._pool, self.count)

    def __del__(self) -> None:
        """Unpin what is free; a parcel that is left holds its own."""
        self._pool.close()


class PinnedParcel:
    """An allocation in the host's memory."""

    __slots__ = ("_coming", "_copies", "_count", "_pool", "_staging")

    def __init__(self, data: Tensor, pool: Pool, count: Count) -> None:
        """Begin to copy it out."""
        self._pool = pool
        self._copies = pool.copies
        self._count = count
        self._coming: Tensor | None = None
        self._staging = pool.take(data.nbytes)
        # On the stream of copies: after whatever used this host memory before.
        self._staging.end = self._copies.begin(self._staging.memory.bytes, data)

    def settle(self) -> None:
        """Let the device wait for the copy, so that what uses its memory next comes later."""
        self._copies.order_after(self._staging.end)

    def fetch(self, target: Tensor) -> None:
        """Copy it back, before what the device is told next."""
        self.prefetch(target)
        self.wait()

    def prefetch(self, target: Tensor) -> None:
        """Begin to copy it back."""
        if self._coming is not None:  # who began that was interrupted
            self.wait()
        self._count.read += target.nbytes
        self._coming = target
        self._staging.end = self._copies.begin(target, self._staging.memory.bytes)

    def wait(self) -> None:
        """Let the device wait for the copy."""
        self._copies.order_after(self._staging.end)
        self._coming = None

    def __del__(self) -> None:
        """Give the memory back; what the device reuses of the source comes after the copy."""
        staging = getattr(self, "_staging", None)
        if staging is not None:
            self._copies.order_after(staging.end)
            self._pool.give_back(staging)


class StagedTier:
    """A file, by way of pinned memory: copies and writes both run beside the computation.

    Attributes:
        folder: Empty: what a device holds cannot be mapped.
    """

    folder = ""

    def __init__(self, copies: Copies, store: Store) -> None:
        """Create it without any memory.

        Args:
            copies: Between the device and the host.
            store: Between the host and the disk.
        """
        self.count = Count()
        self._copies = copies
        self._store = store
        self._pool = Pool(copies)
        # Weakly: whoever lets go of a parcel means to.
        self._copying: deque[weakref.ref[StagedParcel]] = deque()

    def send(self, source: Tensor) -> StagedParcel:
        """Begin to copy the storage of ``source``, and to write what has been copied meanwhile."""
        while self._copying:
            oldest = self._copying[0]()
            if oldest is not None and not oldest.begin_write_if_copied():
                break
            self._copying.popleft()
        parcel = StagedParcel(bytes_of(source), self._pool, self._store, self.count)
        self._copying.append(weakref.ref(parcel))
        return parcel

    def __del__(self) -> None:
        """Unpin what is free."""
        self._pool.close()


class StagedParcel:
    """An allocation in a file; host memory stands between while it moves."""

    __slots__ = (
        "__weakref__",
        "_block",
        "_copies",
        "_count",
        "_pool",
        "_size_bytes",
        "_staging",
        "_store",
        "_target",
    )

    def __init__(self, data: Tensor, pool: Pool, store: Store, count: Count) -> None:
        """Begin to copy it to the host."""
        self._pool = pool
        self._copies = pool.copies
        self._store = store
        self._count = count
        self._block: StoredBlock | None = None
        self._target: Tensor | None = None
        self._size_bytes = data.nbytes
        self._staging: Staging | None = self._take()
        self._staging.end = self._copies.begin(self._staging.memory.bytes, data)

    def begin_write_if_copied(self) -> bool:
        """Begin to write it if it is on the host; whether it is being written."""
        staging = self._staging
        if self._block is None and staging is not None and self._copies.is_over(staging.end):
            self._write(staging)
        return self._block is not None or staging is None

    def settle(self) -> None:
        """Wait until it is written."""
        staging = self._staging
        if staging is None:
            return
        if self._block is None:
            self._wait(staging)
            self._write(staging)
        assert self._block is not None
        self._block.settle()
        self._copies.order_after(staging.end)
        self._let_go()

    def fetch(self, target: Tensor) -> None:
        """Read it and copy it back."""
        self.prefetch(target)
        self.wait()

    def prefetch(self, target: Tensor) -> None:
        """Begin to read it."""
        assert self._block is not None
        if self._target is not None:  # who began that was interrupted
            self.wait()
        staging = self._staging = self._take()
        memory = staging.memory.bytes
        self._target = target
        self._block.prefetch((memory.data_ptr(), memory.nbytes), staging)

    def wait(self) -> None:
        """Wait until it is read, and let the device wait for the copy of it."""
        if self._target is None:
            return
        assert self._block is not None
        assert self._staging is not None
        memory = self._staging.memory.bytes
        try:
            self._block.wait()
        except OffloadError:
            self._fetch_again(memory)
        self._staging.end = self._copies.begin(self._target, memory)
        self._copies.order_after(self._staging.end)
        self._target = None
        self._let_go()

    def _fetch_again(self, memory: Tensor) -> None:
        """An interrupt may have come before the transfer began, or after it had ended."""
        assert self._block is not None
        try:
            self._block.fetch((memory.data_ptr(), memory.nbytes))
        except OffloadError:
            self._target = None  # it is the caller's again
            raise

    def _take(self) -> Staging:
        """Host memory that no copy uses any more: a disk keeps to no stream's order."""
        staging = self._pool.take(self._size_bytes)
        if staging.end is not None:
            self._wait(staging)
        return staging

    def _wait(self, staging: Staging) -> None:
        start = time.perf_counter()
        self._copies.wait(staging.end)
        self._count.seconds_waited += time.perf_counter() - start

    def _write(self, staging: Staging) -> None:
        memory = staging.memory.bytes
        self._block = self._store.write((memory.data_ptr(), memory.nbytes), staging)

    def _let_go(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            self._pool.give_back(staging)

    def __del__(self) -> None:
        """Give host memory back once neither the disk nor the device uses it."""
        staging: Staging | None = getattr(self, "_staging", None)
        if staging is None:
            return
        if self._block is not None:
            self._block.forget()
        if staging.end is not None:
            self._copies.order_after(staging.end)
        self._let_go()
