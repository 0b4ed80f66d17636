"""How fast bytes move between host, device and disk.

Responsible for copies of one large block each way and for a file that no cache helps. Not
responsible for when a plan moves anything.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.measure.curves import timed

_COPY_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
_PASSES = 3
_SECONDS = 2.0
"""No further pass over the file after that."""


def host_device(device: torch.device, seconds: float) -> dict[str, tuple[float, float]]:
    """Bytes a second of copies between host and device, each with its spread; empty on a CPU.

    Args:
        device: The device.
        seconds: About how long to spend.
    """
    if device.type != "cuda":
        return {}
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    found = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        for way, (target, source) in {
            "host_to_device": (there, here),
            "device_to_host": (here, there),
        }.items():

            def copy(target: Any = target, source: Any = source, pinned: Any = pinned) -> None:
                target.copy_(source, non_blocking=pinned)

            fastest, spread, _ = timed(copy, device, seconds / 4)
            found[f"{way}_{name}"] = (_COPY_BYTES / fastest, spread)
    return found


def disk(folder: Path, file_bytes: int) -> tuple[dict[str, tuple[float, float]], str]:
    """Bytes a second of writing and reading a file, with spreads, and how caches were kept out.

    The file is removed, also when something fails.

    Args:
        folder: Where to write.
        file_bytes: Its size; rounded down to whole blocks of 4 MiB, at least one.

    Raises:
        UsageError: The folder cannot be written to, or is full.
    """
    blocks = max(file_bytes // _BLOCK_BYTES, 1)
    try:
        handle, name = tempfile.mkstemp(prefix=".memfit-calibrate-", dir=folder)
    except OSError as error:
        message = f"cannot write to `{folder}`: {error.strerror}\nhint: name a folder with --folder"
        raise UsageError(message) from error
    os.close(handle)
    try:
        return _passes(name, blocks)
    except OSError as error:
        message = f"cannot measure the disk in `{folder}`: {error.strerror}"
        raise UsageError(message) from error
    finally:
        Path(name).unlink(missing_ok=True)


def _passes(name: str, blocks: int) -> tuple[dict[str, tuple[float, float]], str]:
    # Direct transfers need memory that is aligned to pages, which an anonymous map is.
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        # So that no file system compresses it away, whose windows are smaller than a quarter.
        block.write(os.urandom(_BLOCK_BYTES // 4) * 4)
        direct = _direct(name)
        flag = os.O_DIRECT if direct else 0
        times: dict[str, list[float]] = {"disk_write": [], "disk_read": []}
        began = time.perf_counter()
        for _ in range(_PASSES):
            times["disk_write"].append(_write(name, block, blocks, flag))
            times["disk_read"].append(_read(name, block, blocks, flag))
            if time.perf_counter() - began > _SECONDS:
                break
    total = blocks * _BLOCK_BYTES
    rates = {}
    for what, found in times.items():
        middle = statistics.median(found)
        rates[what] = (total / middle, (max(found) - min(found)) / middle)
    how = "direct, past the page cache" if direct else "synced, then dropped from the page cache"
    return rates, how


def _direct(name: str) -> bool:
    """Whether the file system lets files be read and written past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _write(name: str, block: mmap.mmap, blocks: int, flag: int) -> float:
    handle = os.open(name, os.O_WRONLY | os.O_TRUNC | flag)
    try:
        began = time.perf_counter()
        for _ in range(blocks):
            if os.write(handle, block) != _BLOCK_BYTES:
                raise OSError(28, "No space left on device")
        os.fsync(handle)
        return time.perf_counter() - began
    finally:
        os.close(handle)


def _read(name: str, block: mmap.mmap, blocks: int, flag: int) -> float:
    handle = os.open(name, os.O_RDONLY | flag)
    try:
        if not flag and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for _ in range(blocks):
            os.readv(handle, [block])
        return time.perf_counter() - began
    finally:
        os.close(handle)
