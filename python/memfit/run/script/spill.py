"""Contents of saved tensors elsewhere than where the step runs.

Responsible for keeping storages and giving them back, bit for bit: of a GPU in the host's memory,
else in a file. Not responsible for which.

The file has no name from the start, so nothing stays behind, whatever becomes of the process. Room
of contents that nobody needs is used again, and half of what was free in the folder stays free, for
a script may run forward as often as it likes and keep what it saved. Where nothing may be written,
contents stay in memory: an observed step then takes more, and is as right.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections import defaultdict
from typing import Any, BinaryIO

import torch

from memfit.capture.probe.workspace import available_bytes
from memfit.capture.record.saves import InMemory

SMALLEST = 4096
"""Storages below this size are copied in memory."""


_Free = defaultdict[int, list[int]]
"""Offsets that are free again, by the size of what was there: a step saves the same sizes."""


class OnHost:
    """Contents of a GPU's storage, in the host's memory."""

    __slots__ = ("__weakref__", "_device", "_held", "_loaded")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Copy a storage."""
        self._device = storage.device
        self._held = storage.cpu()  # type: ignore[no-untyped-call]
        self._loaded: weakref.ref[Any] | None = None

    @property
    def storage(self) -> torch.UntypedStorage:
        """A storage with the contents: one for all who ask while it lives."""
        storage = self._loaded() if self._loaded is not None else None
        if storage is None:
            storage = _moved(self._held, self._device)
            self._loaded = weakref.ref(storage)
        return storage


class InFile:
    """Contents of a storage, written down; read when they are asked for."""

    __slots__ = ("__weakref__", "_device", "_file", "_free", "_loaded", "_offset", "_size")

    def __init__(
        self, file: BinaryIO, offset: int, storage: torch.UntypedStorage, free: _Free
    ) -> None:
        """Write a storage at an offset, which is free again when this goes.

        Raises:
            OSError: It cannot be written.
        """
        self._file = file
        self._offset = offset
        self._size = storage.nbytes()
        self._device = storage.device
        self._loaded: weakref.ref[Any] | None = None
        held = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
        written = 0
        with _bytes_of(held) as view:
            while written < self._size:
                written += os.pwrite(file.fileno(), view[written:], offset + written)
        self._free = free

    def __del__(self) -> None:
        """Give the room back, if it was ever taken."""
        free: _Free | None = getattr(self, "_free", None)
        if free is not None:
            free[self._size].append(self._offset)

    @property
    def storage(self) -> torch.UntypedStorage:
        """A storage with the contents: one for all who ask while it lives."""
        storage = self._loaded() if self._loaded is not None else None
        if storage is None:
            storage = self._read()
            self._loaded = weakref.ref(storage)
        return storage

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Fill the storage again whose memory was taken.

        Raises:
            OSError: It cannot be read.
        """
        storage.resize_(self._size)
        self._read_into(storage)

    def _read(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(self._size)  # type: ignore[no-untyped-call]
        self._read_into(storage)
        return storage if self._device.type == "cpu" else _moved(storage, self._device)

    def _read_into(self, storage: torch.UntypedStorage) -> None:
        done = 0
        with _bytes_of(storage) as view:
            while done < self._size:
                count = os.preadv(self._file.fileno(), [view[done:]], self._offset + done)
                if count == 0:
                    raise OSError("the file of saved tensors has been cut off")
                done += count


class SpillFile:
    """A nameless file that grows with the contents kept in it.

    Attributes:
        problem: Why contents are kept in memory; empty while they are not.
        bytes: Size of the file.
    """

    def __init__(self) -> None:
        """Open none yet."""
        self.problem = ""
        self.bytes = 0
        self._file: BinaryIO | None = None
        self._free: _Free = defaultdict(list)
        self._host_floor_bytes = -1

    def keep(self, storage: torch.UntypedStorage) -> InMemory | OnHost | InFile:
        """Keep the contents of a storage as they are now."""
        size = storage.nbytes()
        if storage.device.type == "cuda" and size >= SMALLEST and self._has_room_on_host(size):
            return OnHost(storage)
        return self.away(storage) or InMemory(storage)

    def away(self, storage: torch.UntypedStorage) -> InFile | None:
        """Keep contents in the file alone; none, and nothing copied, where it has no room."""
        size = storage.nbytes()
        if size < SMALLEST or self.problem or storage.device.type not in ("cpu", "cuda"):
            return None
        try:
            if self._file is None:
                # Closed when the last contents go, which may be long after the step.
                self._file = tempfile.TemporaryFile(prefix="memfit-", buffering=0)  # noqa: SIM115
            assert self._file is not None
            free = self._free[size]
            if free:
                return InFile(self._file, free.pop(), storage, self._free)
            if _free_bytes(self._file) - size < _kept_free(self._file):
                self.problem = f"half of what was free in `{tempfile.gettempdir()}` is in use"
                return None
            kept = InFile(self._file, self.bytes, storage, self._free)
        except OSError as error:
            folder = tempfile.gettempdir()
            self.problem = f"cannot write to `{folder}`: {error.strerror or error}"
            return None
        self.bytes += size
        return kept

    def _has_room_on_host(self, size: int) -> bool:
        """Whether half of what was free in the host's memory stays so."""
        if self._host_floor_bytes < 0:
            self._host_floor_bytes = available_bytes() // 2
        return available_bytes() - size >= self._host_floor_bytes


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    moved = torch.UntypedStorage(storage.nbytes(), device=device)  # type: ignore[no-untyped-call]
    moved.copy_(storage)
    return moved


def _free_bytes(file: BinaryIO) -> int:
    known = os.fstatvfs(file.fileno())
    return known.f_bavail * known.f_frsize


_floors: dict[int, int] = {}


def _kept_free(file: BinaryIO) -> int:
    """What stays free on a file's device: half of what was when this process first wrote there."""
    return _floors.setdefault(os.fstat(file.fileno()).st_dev, _free_bytes(file) // 2)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
