"""Contents of saved tensors elsewhere than where the step runs.

Responsible for keeping storages and giving them back, bit for bit: of a GPU in the host's memory,
else in a file. Not responsible for which.

The file has no name from the start, so nothing stays behind, whatever becomes of the process. Room
of contents that are no longer needed is used again, and goes back when none are needed. A script
may run forward as often as it likes and keep what it saved: half of what was free in the folder
stays free, and the file holds at most a few times what memory would have. Where nothing may be
written, contents stay in memory: an observed step then takes more, and is as right.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from typing import Any, BinaryIO

import torch

from memfit import _native
from memfit.capture.probe.workspace import available_bytes
from memfit.capture.record.saves import InMemory
from memfit.tensors.storage import address
from memfit.track.retained import IN_FILES

SMALLEST = 4096
"""Storages below this size are copied in memory."""

MOST_MEMORIES = 4
"""The file holds at most so many times what was free in memory."""


class _Room:
    """The file, and which parts of it are free: a step saves the same sizes again and again."""

    def __init__(self, folder: str) -> None:
        # Closed when the last contents go, which may be long after the step.
        self.file: BinaryIO = tempfile.TemporaryFile(  # noqa: SIM115
            prefix="memfit-", buffering=0, dir=folder
        )
        self.bytes = 0
        self._most_bytes = MOST_MEMORIES * available_bytes()
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._lock = threading.RLock()  # contents may go while others come, in this thread too

    def take(self, size: int) -> int | None:
        """An offset; none where there is no room, or not enough would be left to others."""
        with self._lock:
            free = self._free[size]
            if not free:
                is_full = self.bytes + size > self._most_bytes
                if is_full or _free_bytes(self.file) - size < _kept_free(self.file):
                    return None
                free.append(self.bytes)
                self.bytes += size
            self._used += 1
            return free.pop()

    def give_back(self, size: int, offset: int) -> None:
        """What was taken is free again."""
        with self._lock:
            self._used -= 1
            self._free[size].append(offset)
            if not self._used:
                self._free.clear()
                self.bytes = 0
                with contextlib.suppress(OSError, ValueError):  # not cut, or closed
                    os.ftruncate(self.file.fileno(), 0)


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

    __slots__ = ("__weakref__", "_device", "_loaded", "_offset", "_room", "_size")

    def __init__(self, room: _Room, offset: int, storage: torch.UntypedStorage) -> None:
        """Write a storage at an offset, which is free again when this goes.

        Raises:
            OSError: It cannot be written.
        """
        self._room = room
        self._offset = offset
        self._size = storage.nbytes()
        self._device = storage.device
        self._loaded: weakref.ref[Any] | None = None
        place = address(storage) if storage.device.type == "cpu" else None
        if place is not None:
            IN_FILES[self] = self._size, _native.block_event(place)
        held = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
        written = 0
        with _bytes_of(held) as view:
            while written < self._size:
                written += os.pwrite(room.file.fileno(), view[written:], offset + written)

    def __del__(self) -> None:
        """Give the room back."""
        self._room.give_back(self._size, self._offset)

    @property
    def bytes(self) -> int:
        """How many there are."""
        return self._size

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
                count = os.preadv(self._room.file.fileno(), [view[done:]], self._offset + done)
                if count == 0:
                    raise OSError("the file of saved tensors has been cut off")
                done += count


class SpillFile:
    """A nameless file that grows with the contents kept in it.

    Attributes:
        problem: Why contents are kept in memory; empty while they are not.
    """

    def __init__(self, folder: str = "") -> None:
        """Open none yet.

        Args:
            folder: Where; empty for the system's folder for temporary files.
        """
        self._folder = folder or tempfile.gettempdir()
        self.problem = ""
        self._room: _Room | None = None
        self._host_floor_bytes = -1

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return 0 if self._room is None else self._room.bytes

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
            self._room = self._room or _Room(self._folder)
            offset = self._room.take(size)
            if offset is not None:
                return InFile(self._room, offset, storage)
            self.problem = (
                f"half of what was free in `{self._folder}` is in use, or {MOST_MEMORIES} "
                "times what was free in memory"
            )
        except OSError as error:
            self.problem = f"cannot write to `{self._folder}`: {error.strerror or error}"
        return None

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
