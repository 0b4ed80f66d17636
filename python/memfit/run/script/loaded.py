"""What the script loads, in mapped files instead of memory.

A checkpoint that is read lies beside the model that it is for, and often beside an optimizer: that
is more than a step holds. Responsible for having each storage that ``torch.load`` reads in a mapped
file before the next one is read. Not responsible for when there is no room for them
(:mod:`memfit.run.script.between_passes`), nor for what is written later
(:mod:`memfit.run.script.held_in_files`).

The mapped file is memfit's own: the script may write over the one that it has read.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.serialization import default_restore_location
from torch.utils.serialization import config

from memfit.apply.offload.mapped import LEAST_BYTES, in_file

LOADED_IN_FILES = "what `torch.load` reads is in mapped files, where there is no room for it"
"""What is said at the end where that was done."""

_OF_TORCHSCRIPT = "/constants.pkl"

_MOST_STORAGES = 4096
"""Each takes a mapping, of which a process has 65530."""


def loadable_bytes(file: Any, map_location: Any, *, mmap: bool | None) -> int:
    """How much ``torch.load`` reads that may be in a mapped file instead of memory.

    Args:
        file: What is to be read.
        map_location: Where to, as torch takes it.
        mmap: Whether the script's own file is mapped; ``None`` for what torch's settings say.

    Returns:
        Bytes of the file; 0 where it is to be read as ever: what is no file, is TorchScript, goes
        to another device, or comes in the format of before torch 1.6, whose storages are filled
        once they are where they belong.
    """
    mmap = config.load.mmap if mmap is None else mmap
    is_of_host = map_location is None or str(map_location) == "cpu"
    if mmap or not is_of_host or not isinstance(file, str | os.PathLike):
        return 0
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (OSError, zipfile.BadZipFile):
        return 0  # torch says what is wrong
    if any(entry.filename.endswith(_OF_TORCHSCRIPT) for entry in entries):
        return 0
    return sum(entry.file_size for entry in entries)


@dataclass
class LoadCall:
    """One call of ``torch.load``.

    Attributes:
        file: What is to be read.
        map_location: Where to, as torch takes it.
        mmap: As :func:`loadable_bytes` takes it.
        place: Where the files are to be; empty to read as ever.
        mapped: Where in memory each file is.
    """

    file: Any
    map_location: Any
    mmap: bool | None
    place: str = ""
    mapped: set[int] = field(default_factory=set)

    def restored(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """A storage that was read, where it belongs: what torch calls as a map location."""
        wanted = location if self.map_location is None else "cpu"
        restored: Any = default_restore_location(storage, wanted)  # type: ignore[no-untyped-call]
        assert isinstance(restored, torch.UntypedStorage), "as torch says"
        there = restored
        is_large = there.device.type == "cpu" and there.nbytes() >= LEAST_BYTES
        if not is_large or len(self.mapped) >= _MOST_STORAGES:
            return there
        try:
            there = in_file(there, self.place)
        except (OSError, RuntimeError):
            return there  # it stays in memory
        self.mapped.add(there.data_ptr())
        return there
