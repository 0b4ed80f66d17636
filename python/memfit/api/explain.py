"""The questions asked of a CUDA memory snapshot: :func:`memfit.explain`, :func:`memfit.replay`.

Responsible for taking a snapshot as a file or as what ``torch.cuda.memory._snapshot()`` returns,
and OOM messages as a file, a text or the caught error.
Not responsible for what is found in it (the engine). Needs no torch.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, overload

from memfit import _native
from memfit.answers import Explanation, OomMessages, Replay
from memfit.errors import SnapshotError, UsageError

Source: TypeAlias = str | os.PathLike[str] | dict[str, Any]
"""A file that ``torch.cuda.memory._dump_snapshot`` wrote, or ``torch.cuda.memory._snapshot()``."""

_IN_MEMORY = "(snapshot in memory)"
_MESSAGE = "(OOM message)"


@overload
def explain(
    snapshot: dict[str, Any],
    *,
    before: Source | None = None,
    steps: int | None = None,
    device_memory: str | int | None = None,
) -> Explanation: ...


@overload
def explain(snapshot: BaseException) -> OomMessages: ...


@overload
def explain(
    snapshot: str | os.PathLike[str],
    *,
    before: Source | None = None,
    steps: int | None = None,
    device_memory: str | int | None = None,
) -> Explanation | OomMessages: ...


def explain(
    snapshot: Source | BaseException,
    *,
    before: Source | None = None,
    steps: int | None = None,
    device_memory: str | int | None = None,
) -> Explanation | OomMessages:
    """Say what happened to the memory of a CUDA device, and why; or what an OOM message decides.

    Nothing in a file is executed: it is read as data.

    Args:
        snapshot: A file that ``torch.cuda.memory._dump_snapshot`` wrote, gzip'ed or not, or what
            ``torch.cuda.memory._snapshot()`` returned. Or OOM messages: the caught
            ``torch.OutOfMemoryError``, its text, or a file that holds it, such as a log.
        before: An earlier snapshot of the same program: says what grew since.
        steps: Steps between the two; counted by annotations when left out.
        device_memory: Memory of the device (``"80GiB"`` or bytes), which no snapshot has: an OOM is
            then divided into what others held, too.

    Returns:
        The explanation of a snapshot, or that of OOM messages; ``print`` shows the report.

    Raises:
        SnapshotError: The file or the dictionary is no memory snapshot, and holds no OOM message.
        UsageError: The file cannot be read, the error is another one, or the arguments are wrong.
        BudgetError: ``device_memory`` cannot be read.
    """
    if steps is not None and (before is None or steps < 1):
        raise UsageError(f"`steps={steps}` counts the steps since `before`, at least one")
    source, data = _content(snapshot)
    told = None if data is None else _native.oom_messages(data, source)
    if told is None:
        native = _snapshot(snapshot, source, data)
        earlier = None if before is None else _read(before)
        return Explanation.of(native.explain(source, earlier, steps, _bytes(device_memory)))
    for name, value in (("before", before), ("device_memory", device_memory)):
        if value is not None:
            message = (
                f"`{name}` has no meaning for `{source}`: it is a text with OOM messages, "
                "not a snapshot"
            )
            raise UsageError(message)
    return OomMessages.told(*told)


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


def _content(subject: object) -> tuple[str, bytes | None]:
    """The name and the bytes of a file or of a message; no bytes of a snapshot in memory."""
    if isinstance(subject, dict):
        return _IN_MEMORY, None
    if isinstance(subject, (str, BaseException)):
        text = str(subject).encode(errors="replace")
        # No path holds a whole message.
        if isinstance(subject, BaseException) or _native.oom_messages(text, _MESSAGE) is not None:
            return _MESSAGE, text
    if not isinstance(subject, (str, os.PathLike)):
        message = (
            "expected a file, what `torch.cuda.memory._snapshot()` returns, or an OOM message, "
            f"got `{type(subject).__name__}`"
        )
        raise UsageError(message)
    path = Path(subject)
    try:
        return str(path), path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read `{path}`: {reason}") from error


def _snapshot(subject: object, source: str, data: bytes | None) -> _native.Snapshot:
    """The snapshot in a file's bytes or in memory."""
    if isinstance(subject, BaseException):
        message = f"`{type(subject).__name__}` holds no OOM message of PyTorch: {subject}"
        raise UsageError(message)
    if data is None:
        return _native.Snapshot.decode(pickle.dumps(subject, protocol=4))
    try:
        return _native.Snapshot.decode(data)
    except SnapshotError as error:
        raise SnapshotError(f"cannot read `{source}`: {error}") from error


def _read(subject: Source) -> tuple[str, _native.Snapshot]:
    """A snapshot with its name."""
    source, data = _content(subject)
    return source, _snapshot(subject, source, data)


def _bytes(amount: str | int | None) -> int | None:
    """An amount of memory as written, in bytes."""
    if amount is None:
        return None
    if isinstance(amount, str) and amount.rstrip().endswith("%"):
        raise UsageError(f"`device_memory={amount}` is no amount of bytes")
    return _native.parse_budget(str(amount), 0)
