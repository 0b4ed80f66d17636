"""Contents of saved tensors in a file instead of memory.

Responsible for writing storages and reading them back, bit for bit. Not responsible for which.

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

from memfit.capture.record.saves import InMemory

SMALLEST = 4096
"""Storages below this size are copied in memory."""


_Free = defaultdict[int, list[int]]
"""Offsets that are free again, by the size of what was there: a step saves the same sizes."""


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

    def _read(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(self._size)  # type: ignore[no-untyped-call]
        done = 0
        with _bytes_of(storage) as view:
            while done < self._size:
                count = os.preadv(self._file.fileno(), [view[done:]], self._offset + done)
                if count == 0:
                    raise OSError("the file of saved tensors has been cut off")
                done += count
        if self._device.type == "cpu":
            return storage
        moved = torch.UntypedStorage(self._size, device=self._device)  # type: ignore[no-untyped-call]
        moved.copy_(storage)
        return moved


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

    def keep(self, storage: torch.UntypedStorage) -> InMemory | InFile:
        """Keep the contents of a storage as they are now."""
        size = storage.nbytes()
        if size < SMALLEST or self.problem or storage.device.type not in ("cpu", "cuda"):
            return InMemory(storage)
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
                return InMemory(storage)
            kept = InFile(self._file, self.bytes, storage, self._free)
        except OSError as error:
            folder = tempfile.gettempdir()
            self.problem = f"cannot write to `{folder}`: {error.strerror or error}"
            return InMemory(storage)
        self.bytes += size
        return kept


def _free_bytes(file: BinaryIO) -> int:
    known = os.fstatvfs(file.fileno())
    return known.f_bavail * known.f_frsize


_floors: dict[int, int] = {}


def _kept_free(file: BinaryIO) -> int:
    """What stays free on a file's device: half of what was when this process first wrote there."""
    return _floors.setdefault(os.fstat(file.fileno()).st_dev, _free_bytes(file) // 2)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
