"""What a process with torch takes besides tensors, measured.

Responsible for two numbers: what is expected before a script runs (from a process of its own that
trains a small step, kept for the next time) and what is there now. Not responsible for tensors
(:mod:`memfit.track`) nor for leases.

On the host: resident memory that is the process's own (``RssAnon``) less the tensors in it, so the
interpreter's heap, torch's own tables, scratch memory of oneDNN and OpenMP, stacks. On CUDA: what
the device has in use more than before, less what the allocator reserved; so the context, kernels
and cuBLAS. That is right only while nobody else on the device comes or goes.

Run as a program, with a device, it prints the number. Imports no torch otherwise: a script may set
environment variables before it does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from memfit import _native
from memfit.errors import MemfitError, UsageError
from memfit.tensors.heap import trim

_SECONDS = 120.0
"""Longest that the other process may take."""


def expected(device: str) -> int:
    """Bytes that a training script takes besides tensors, from the start.

    Args:
        device: ``host`` or ``cuda:0``.

    Raises:
        UsageError: The process that measures it fails.
    """
    file, key = _file(), _key(device)
    known = _read(file)
    if isinstance(known.get(key), int):
        return int(known[key])
    command = [sys.executable, "-P", "-m", __name__, device]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter runs this module
            command, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        found = int(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        message = f"cannot measure what torch itself takes on `{device}`: {said[-1]}"
        raise UsageError(message) from error
    _write(file, {**known, key: found})
    return found


def present(device: str) -> int | None:
    """Bytes that this process takes besides tensors now.

    Args:
        device: ``host``; nobody tells a process its part of a GPU.

    Returns:
        The bytes; ``None`` where they are not known.
    """
    if device != "host":
        return None
    found = resident()
    return max(found - _native.counted_bytes(), 0) if found else None


def release(device: str) -> None:
    """Give back what allocators keep for later, so that another process can have it.

    Args:
        device: ``host`` or ``cuda:0``: whose memory is needed.
    """
    torch = sys.modules.get("torch")
    if device == "host":
        _native.release_kept()
        trim()
    elif torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def in_use(device: str) -> int:
    """What this process holds of a device now, tensors included.

    Args:
        device: ``host`` or ``cuda:0``.
    """
    if device == "host":
        return resident()
    # Awake models that can be parked lie in memory of the driver's, which torch does not count.
    parkable = _native.held_cuda_bytes(int(device.rpartition(":")[2]))
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return parkable
    return parkable + int(torch.cuda.memory_reserved(torch.device(device))) + expected(device)


def resident() -> int:
    """The process's own resident memory, 0 where nobody tells; pages of files do not count."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) << 10
    return 0


def _key(device: str) -> str:
    """What the number depends on: it is kept until one of these is another."""
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = "none"
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "") if device != "host" else ""
    parts = (device, torch_version, platform.python_version(), platform.node(), seen)
    return " ".join(filter(None, parts))


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return folder / "memfit" / "besides.json"


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text())
        if isinstance(known, dict):
            return known
    return {}


def _write(file: Path, known: dict[str, Any]) -> None:
    """Keep the number; where that cannot be, it is measured again."""
    from memfit.answers import save

    with contextlib.suppress(OSError, MemfitError):
        file.parent.mkdir(parents=True, exist_ok=True)
        save(file, json.dumps(known, indent=1).encode())


def _measure(device: str) -> int:
    """Train a small step here and see what it took besides its tensors."""
    before = _used(device)
    import torch

    place = torch.device("cpu" if device == "host" else device)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(6272, 256)
    ).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    if device == "host":
        from memfit.track import cpu

        cpu.start()
    for _ in range(2):
        model(torch.randn(8, 3, 16, 16, device=place)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    if device == "host":
        trim()
        return present("host") or 0
    torch.cuda.synchronize(place)
    return max(_used(device) - before - torch.cuda.memory_reserved(place), 0)


def _used(device: str) -> int:
    """What a GPU has in use."""
    return next((used for name, _, used in _native.gpu_memory() if name == device), 0)


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))  # noqa: T201 - the answer of this program
