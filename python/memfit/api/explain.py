"""The questions asked of a CUDA memory snapshot: :func:`memfit.explain`, :func:`memfit.replay`.

Responsible for taking a snapshot as a file or as what ``torch.cuda.memory._snapshot()`` returns.
Not responsible for what is found in it (the engine). Needs no torch.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from memfit import _native
from memfit.answers import Explanation, Replay
from memfit.errors import SnapshotError, UsageError

Source: TypeAlias = str | os.PathLike[str] | dict[str, Any]
"""A file that ``torch.cuda.memory._dump_snapshot`` wrote, or ``torch.cuda.memory._snapshot()``."""

_IN_MEMORY = "(snapshot in memory)"


def explain(
    snapshot: Source,
    *,
    before: Source | None = None,
    steps: int | None = None,
    device_memory: str | int | None = None,
) -> Explanation:
    """Say what happened to the memory of a CUDA device, and why.

    Nothing in a file is executed: it is read as data.

    Args:
        snapshot: A file that ``torch.cuda.memory._dump_snapshot`` wrote, gzip'ed or not, or what
            ``torch.cuda.memory._snapshot()`` returned.
        before: An earlier snapshot of the same program: says what grew since.
        steps: Steps between the two; counted by annotations when left out.
        device_memory: Memory of the device (``"80GiB"`` or bytes), which no snapshot has: an OOM is
            then divided into what others held, too.

    Returns:
        The explanation; ``print`` shows the report.

    Raises:
        SnapshotError: The file or the dictionary is no memory snapshot.
        UsageError: The file cannot be read, or the arguments are wrong.
        BudgetError: ``device_memory`` cannot be read.
    """
    source, native = _read(snapshot)
    earlier = None if before is None else _read(before)
    if steps is not None and (before is None or steps < 1):
        raise UsageError(f"`steps={steps}` counts the steps since `before`, at least one")
    return Explanation.of(native.explain(source, earlier, steps, _bytes(device_memory)))


def replay(
    snapshot: Source,
    settings: Mapping[str, object] | None = None,
    *,
    device_memory: str | int | None = None,
) -> Replay:
    """Run the requests of a snapshot again under other settings of the caching allocator.

    Args:
        snapshot: As in :func:`explain`.
        settings: As in ``PYTORCH_CUDA_ALLOC_CONF``, ``{"max_split_size_mb": 256}``, on top of those
            of the recording; by default those worth trying.
        device_memory: As in :func:`explain`: where less is free, more is refused.

    Returns:
        What each of the settings would have taken, the best first.

    Raises:
        SnapshotError: The file or the dictionary is no memory snapshot.
        UsageError: The file cannot be read, or a setting is unknown.
        BudgetError: ``device_memory`` cannot be read.
    """
    source, native = _read(snapshot)
    asked = ",".join(f"{name}:{value}" for name, value in (settings or {}).items())
    return Replay.told(*native.replay(source, asked, _bytes(device_memory)))


def _read(snapshot: Source) -> tuple[str, _native.Snapshot]:
    """A snapshot with its name."""
    if isinstance(snapshot, dict):
        return _IN_MEMORY, _native.Snapshot.decode(pickle.dumps(snapshot, protocol=4))
    if not isinstance(snapshot, (str, os.PathLike)):
        message = (
            "expected a file or what `torch.cuda.memory._snapshot()` returns, "
            f"got `{type(snapshot).__name__}`"
        )
        raise UsageError(message)
    path = Path(snapshot)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}") from error
    try:
        return str(path), _native.Snapshot.decode(data)
    except SnapshotError as error:
        raise SnapshotError(f"cannot read `{path}`: {error}") from error


def _bytes(amount: str | int | None) -> int | None:
    """An amount of memory as written, in bytes."""
    if amount is None:
        return None
    if isinstance(amount, str) and amount.rstrip().endswith("%"):
        raise UsageError(f"`device_memory={amount}` is no amount of bytes")
    return _native.parse_budget(str(amount), 0)
