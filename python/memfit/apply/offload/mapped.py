"""Tensors whose memory is a mapped file.

Responsible for exchanging a tensor's memory for a private mapping of a file with the same bytes,
and the other way round, and for whether that is safe. Python, ops and forked children read the same
bytes as before. A write gives the process pages of its own, which are memory again. Not responsible
for which tensors go, nor for when.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from ctypes import string_at
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from memfit import _native
from memfit.tensors.storage import (
    address,
    gradient_of,
    graph_of,
    has_others,
    is_fixed,
    is_from_allocator,
    is_leaf,
    note_exchange,
    note_private_mapping,
)

LEAST_BYTES = 1 << 16
"""Smaller tensors stay that would go in every step."""

_SAMPLE = 16
"""Bytes at the beginning, in the middle and at the end of a tensor that tell of a write."""

Moves = Callable[[Tensor, torch.UntypedStorage], None]
"""Told of a tensor, and of the other memory that it is about to have."""

_KINDS = (Tensor, nn.Parameter, nn.Buffer)

_WAITING = frozenset(
    {
        ("connection.py", "_poll"),
        ("connection.py", "_recv"),
        ("connection.py", "_send"),
        ("connection.py", "accept"),
        ("pool.py", "_handle_tasks"),
        ("selectors.py", "select"),
        ("socket.py", "accept"),
        ("socket.py", "readinto"),
        ("subprocess.py", "_try_wait"),
        ("thread.py", "_worker"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("threading.py", "join"),
        ("threading.py", "wait"),
    }
)
"""Files and functions of Python's library in which threads wait for locks, queues and sockets."""

_OWN_THREADS = "memfit-"
"""How the names of memfit's own threads begin, which touch no tensor of the script's."""

OF_GRADIENT = 2
"""Owners of a gradient: its parameter, and Python's object."""


def exchange_memory(tensor: Tensor, storage: torch.UntypedStorage) -> None:
    """Have a tensor in other memory, which has its bytes.

    Args:
        tensor: The tensor; no array shares its memory, and each tensor that does is exchanged too.
        storage: The other memory.
    """
    # What is made for inference would make the tensor one of inference, too.
    ordinary = torch.inference_mode(mode=False)
    with torch._C._DisableTorchDispatch(), torch.no_grad(), ordinary:
        there = torch.empty(0, dtype=tensor.dtype)
        there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = there


def to_file(tensor: Tensor, place: str, moves: Moves | None = None) -> None:
    """Have a tensor in a mapped file.

    Args:
        tensor: One that may go.
        place: Where the file is.
        moves: Called before its memory is exchanged; ``None`` for no call.

    Raises:
        OSError: It cannot be written.
        RuntimeError: It cannot be mapped.
    """
    with torch._C._DisableTorchDispatch():  # no op of the script's
        storage = in_file(tensor.untyped_storage(), place)
        if moves is not None:
            moves(tensor, storage)
        exchange_memory(tensor, storage)


def to_memory(tensor: Tensor, moves: Moves | None = None) -> None:
    """Have a tensor in memory again.

    Args:
        tensor: One in a mapped file; no view of it, and no array of numpy, is left.
        moves: As :func:`to_file`.
    """
    with torch._C._DisableTorchDispatch():
        storage = in_memory(tensor.untyped_storage())
        if moves is not None:
            moves(tensor, storage)
        exchange_memory(tensor, storage)


def in_file(storage: torch.UntypedStorage, folder: str) -> torch.UntypedStorage:
    """The bytes of a storage, in a file without a name.

    Args:
        storage: The storage.
        folder: Where the file is.

    Raises:
        OSError: They cannot be written.
        RuntimeError: They cannot be mapped.
    """
    with tempfile.TemporaryFile(prefix="memfit-", dir=folder) as file:
        is_file, with_size, element_bytes = True, False, 1
        storage._write_file(file, is_file, with_size, element_bytes)  # type: ignore[no-untyped-call]
        file.flush()
        name = f"/proc/self/fd/{file.fileno()}"
        is_shared = False
        mapped: Any = torch.UntypedStorage.from_file(name, is_shared, storage.nbytes())
    assert isinstance(mapped, torch.UntypedStorage), "as torch says"
    note_private_mapping(mapped)
    note_exchange(mapped, storage)
    return mapped


def in_memory(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The bytes of a storage, in memory of their own.

    Args:
        storage: The storage.
    """
    own = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    own.copy_(storage)
    note_exchange(own, storage)
    return own


def rows_may_go(gradient: Tensor) -> bool:
    """Whether nothing but a sparse gradient uses the memory of its values.

    Args:
        gradient: A gradient of any layout.
    """
    if type(gradient) is not Tensor or gradient.layout is not torch.sparse_coo:
        return False
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        values = gradient._values()
    storage = values.untyped_storage()
    place = address(storage)
    if gradient.device.type != "cpu" or place is None or not is_from_allocator(storage):
        return False
    is_large = _native.is_counted(place) and storage.nbytes() >= LEAST_BYTES
    return is_large and not has_others(storage, 2)


def rows_to_file(gradient: Tensor, place: str, moves: Moves | None = None) -> None:
    """Have the values of a sparse gradient in a mapped file.

    Args:
        gradient: One whose values may go.
        place: Where the file is.
        moves: As :func:`to_file`; told of the values.

    Raises:
        OSError: They cannot be written.
        RuntimeError: They cannot be mapped.
    """
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        values = gradient._values()
        storage = in_file(values.untyped_storage(), place)
        if moves is not None:
            moves(values, storage)
        exchange_memory(values, storage)
        gradient.data = torch.sparse_coo_tensor(
            gradient._indices(),
            values,
            gradient.size(),
            is_coalesced=gradient.is_coalesced(),
            check_invariants=False,
        )


def bytes_sampled(tensor: Tensor) -> bytes:
    """A few of a tensor's bytes: of what is written through ``.data`` no version tells.

    Args:
        tensor: The tensor.
    """
    storage = tensor.untyped_storage()
    start, last = address(storage), storage.nbytes() - _SAMPLE
    if start is None or last < 0:
        return b""  # it has other memory by now, or none
    return b"".join(string_at(start + at, _SAMPLE) for at in (0, last // 2, last))


def is_alone() -> bool:
    """Whether no other thread may be in the middle of an op; those of queues only pickle."""
    own = threading.current_thread()
    return all(it is own or it.name == "QueueFeederThread" for it in threading.enumerate())


def others_wait() -> bool:
    """Whether each other thread waits in Python's library: none is in the middle of an op."""
    names = {it.ident: it.name for it in threading.enumerate()}
    names[threading.get_ident()] = _OWN_THREADS
    frames = (
        frame
        for thread, frame in sys._current_frames().items()
        if not names.get(thread, "").startswith(_OWN_THREADS)
    )
    return all(
        (PurePath(it.f_code.co_filename).name, it.f_code.co_name) in _WAITING for it in frames
    )


def is_lent(tensor: Tensor, owners: int = 1) -> bool:
    """Whether more than Python has a tensor: a graph, or what ``dlpack`` gave its address to.

    Args:
        tensor: The tensor.
        owners: How many it has else, Python's object among them.
    """
    return int(tensor._use_count()) > owners


def may_go(
    tensor: Tensor,
    *,
    is_mapped: bool = False,
    least_bytes: int = LEAST_BYTES,
    untrained: bool = False,
) -> bool:
    """Whether a tensor is torch's own memory on the CPU that nobody else sees.

    Args:
        tensor: The tensor.
        is_mapped: Whether it is to have gone already.
        least_bytes: Smaller ones may not.
        untrained: Whether parameters may that nothing trains now.
    """
    if not may_exchange(tensor, untrained=untrained) or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    if is_mapped != is_fixed(tensor) and (is_mapped or not is_from_allocator(storage)):
        return False
    place = address(storage)
    is_own = place is not None and _native.is_counted(place) != is_mapped
    return is_own and storage.nbytes() >= least_bytes and not has_others(storage, 1)


def may_exchange(tensor: Tensor, *, untrained: bool = False) -> bool:
    """Whether a tensor is torch's own and plain, so that it may have other memory.

    Args:
        tensor: The tensor.
        untrained: Whether parameters may that nothing trains now.
    """
    if type(tensor) not in _KINDS or tensor.layout is not torch.strided:
        return False
    if tensor.requires_grad and not (untrained and is_leaf(tensor) and gradient_of(tensor) is None):
        return False
    return graph_of(tensor) is None and not _is_special(tensor)


def _is_special(tensor: Tensor) -> bool:
    """Whether a tensor is more than its bytes, sizes and type."""
    lazily = tensor.is_conj() or tensor.is_neg()
    has_names = any(getattr(tensor, "names", ()))
    return bool(lazily or has_names or tensor.is_inference() or tensor.is_quantized)
