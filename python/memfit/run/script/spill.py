"""Contents of saved tensors in a file instead of memory.

Responsible for writing storages and reading them back, bit for bit. Not responsible for which.

The file has no name from the start, so nothing stays behind, whatever becomes of the process. Where
it cannot be written, contents stay in memory: an observed step then takes more, and is as right.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from typing import Any, BinaryIO

import torch

from memfit.capture.record.saves import InMemory

SMALLEST = 4096
"""Storages below this size are copied in memory."""


class InFile:
    """Contents of a storage, written down; read when they are asked for."""

    __slots__ = ("__weakref__", "_device", "_file", "_loaded", "_offset", "_size")

    def __init__(self, file: BinaryIO, offset: int, storage: torch.UntypedStorage) -> None:
        """Write a storage at an offset.

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
        bytes: Bytes written.
    """

    def __init__(self) -> None:
        """Open none yet."""
        self.problem = ""
        self.bytes = 0
        self._file: BinaryIO | None = None

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
            kept = InFile(self._file, self.bytes, storage)
        except OSError as error:
            folder = tempfile.gettempdir()
            self.problem = f"cannot write to `{folder}`: {error.strerror or error}"
            return InMemory(storage)
        self.bytes += size
        return kept


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
