"""Where the bytes of a tensor are, and whose.

Responsible for the tensors inside one of a class that wraps others, which has no bytes itself but a
storage as large as if it had them all, and inside a sparse one, which has no storage; for telling
whose memory is not torch's own: of a mapped file, an array, a parkable model, or shared between
processes; and which parameters somebody keeps a view of. Not responsible for what is done about it.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit import _native
from memfit.tensors.barrier import without_barrier

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Classes of most tensors, of which nothing has to be asked."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class hold others: a quantised weight and its scales, a shard."""
    return kind not in _PLAIN and hasattr(kind, "__tensor_flatten__")


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the bytes of one: itself, or what it wraps, however deep."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return [tensor]
    return [part for _, part in named_parts(tensor)]


def named_parts(tensor: Tensor, name: str = "") -> list[tuple[str, Tensor]]:
    """The same, with names.

    Args:
        tensor: The tensor.
        name: Its name; that of an attribute follows after a dot.
    """
    if tensor.layout in _SPARSE:
        return _sparse_parts(tensor, name)
    if not is_wrapper(type(tensor)):
        return [(name, tensor)]
    attributes = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [
        part
        for attribute in attributes
        for part in named_parts(getattr(tensor, attribute), f"{name}.{attribute}")
    ]


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""What the tensors of each sparse layout consist of."""


def _sparse_parts(tensor: Tensor, name: str) -> list[tuple[str, Tensor]]:
    """The strided tensors of a sparse one; looking at them is no op of a step."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return [
            (f"{name}.{part.lstrip('_')}", getattr(tensor, part)())
            for part in _SPARSE[tensor.layout]
        ]


def is_fixed(tensor: Tensor) -> bool:
    """Whether the memory of a tensor cannot be let go and had again.

    Args:
        tensor: A strided tensor. One without memory, or behind a barrier, is fine.

    Returns:
        Whether it wraps others, its storage cannot be resized, or other processes have it too. Of a
        GPU's memory torch says that it is always shared (``Tensor.is_shared``), which tells
        nothing; what came from another process cannot be resized there
        (``THPStorage_newSharedCuda``).
    """
    if is_wrapper(type(tensor)):
        return True
    if isinstance(tensor, FakeTensor):
        return False
    with without_barrier():
        if tensor.is_meta:
            return False
        storage = tensor.untyped_storage()
        if not storage.resizable():
            return True
        # Of memory without an address, to ask whether it is shared would end the process.
        is_known = storage.device.type == "cpu" and address(storage) is not None
        return is_known and bool(storage.is_shared())


_private_mappings: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_exchanged: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}


def note_private_mapping(storage: torch.UntypedStorage) -> None:
    """Know of a mapping of a file that nobody sees but by its tensor.

    Args:
        storage: Its memory.
    """
    key = storage._cdata
    _private_mappings[key] = weakref.ref(storage, lambda _: _private_mappings.pop(key, None))


def note_exchange(storage: torch.UntypedStorage, before: torch.UntypedStorage) -> None:
    """Know of memory that takes the place of other memory: it came when that did.

    Args:
        storage: The memory.
        before: What it takes the place of.
    """
    key, place = storage._cdata, address(before)
    _, event = _exchanged.get(before._cdata, (None, 0))
    event = event or (0 if place is None else _native.block_event(place))
    ref = weakref.ref(storage, lambda _: _exchanged.pop(key, None))
    _exchanged[key] = ref, event


def exchanged() -> list[tuple[int, int, int]]:
    """Of memory that was exchanged: address, bytes, and the event by which the first one came."""
    known = ((ref(), event) for ref, event in list(_exchanged.values()))
    found = [(it, event) for it, event in known if it is not None]
    places = [(address(it), it.nbytes(), event) for it, event in found]
    return [(place, size, event) for place, size, event in places if place is not None]


def is_private_mapping(storage: torch.UntypedStorage) -> bool:
    """Whether memory is a mapping that was noted.

    Args:
        storage: The memory.
    """
    known = _private_mappings.get(storage._cdata)
    return known is not None and known() is not None


def may_change_unseen(tensor: Tensor) -> bool:
    """Whether others than torch's ops may write to a tensor's memory, which no version would tell.

    So an array of numpy may, of which the tensor was made, or which was made of it: torch does not
    let such memory be resized, nor what ``torch.load`` has read. Parameters are taken to be written
    by ops alone. Of memory that processes share, see :func:`shared_digest`.

    Args:
        tensor: A strided tensor.
    """
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor) or is_wrapper(type(tensor)):
        return False
    storage = tensor.untyped_storage()
    if storage.resizable() or address(storage) is None:
        return False
    is_private = is_private_mapping(storage)
    return not (is_private or storage.is_shared() or _is_of_parameter(tensor))


def shared_digest(tensor: Tensor) -> int | None:
    """Of memory that other processes may write to, a sum that tells whether one has.

    Args:
        tensor: A strided tensor.

    Returns:
        The sum; ``None`` of other memory, and of parameters.
    """
    if tensor.device.type != "cpu" or is_wrapper(type(tensor)):
        return None
    storage = tensor.untyped_storage()
    place = address(storage)
    if place is None or not storage.is_shared() or _is_of_parameter(tensor):
        return None
    start, count = place + tensor.storage_offset() * tensor.itemsize, int(reach_of(tensor))
    return crc32((ctypes.c_char * (count * tensor.itemsize)).from_address(int(start)))


def reach_of(tensor: Tensor) -> int:
    """Elements of a strided tensor's memory from its first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))


def _is_of_parameter(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, torch.nn.Parameter)


def is_from_allocator(storage: torch.UntypedStorage) -> bool:
    """Whether memory on the CPU came from torch's allocator alone, and goes back there.

    That it cannot be resized tells less: what ``torch.load`` has read cannot be, and neither can
    what an array of numpy has seen once. What an array or a capsule lends, a mapped file and shared
    memory are freed by another function than the allocator's.

    Args:
        storage: The memory.

    Returns:
        Whether it is certain.
    """
    known, place = _freed_by_allocator(), address(storage)
    if known is None or place is None or storage.device.type != "cpu":
        return False
    index, function = known
    return _words(storage)[index : index + 3] == [place, function, place]


_LEAST_WORDS = 8
"""Words that a ``c10::StorageImpl`` has at least."""


def _words(storage: torch.UntypedStorage) -> list[int]:
    """The beginning of torch's object for memory, which Python has no other look at."""
    return list((ctypes.c_size_t * _LEAST_WORDS).from_address(storage._cdata))


@cache
def _freed_by_allocator() -> tuple[int, int] | None:
    """Where a storage has address, function that frees it and context, and the allocator's one.

    So does a ``c10::DataPtr`` begin (``UniqueVoidPtr.h``). Looked for in memory that is known, and
    ``None`` where it is not found, or where arrays of numpy would not count as owners.
    """
    with torch._C._DisableTorchDispatch():  # no op of the script's, which may be recorded
        own = torch.empty(1, device="cpu")
        lent = torch.frombuffer(bytearray(4), dtype=torch.float32)
        storage, other = own.untyped_storage(), lent.untyped_storage()
        place, words, theirs = storage.data_ptr(), _words(storage), _words(other)
        found = [
            (index, words[index + 1])
            for index in range(_LEAST_WORDS - 2)
            if words[index] == words[index + 2] == place
            and theirs[index] == other.data_ptr() != theirs[index + 2]
            and theirs[index + 1] != words[index + 1]
        ]
        alone = _owners(storage)[0]
        try:
            array = own.numpy()
        except RuntimeError:  # without numpy nothing gives arrays away
            return found[0] if len(found) == 1 else None
        is_seen = _owners(storage)[0] > alone
        del array
    return found[0] if len(found) == 1 and is_seen else None


_torchs_own: Any = Tensor.grad


def gradient_of(tensor: Tensor) -> Tensor | None:
    """A tensor's gradient as torch has it, though someone is told of every look at it.

    Torch warns who asks a tensor for one that keeps none, as where a step lends a module others.
    """
    with torch._C.DisableTorchFunction():
        if not (is_leaf(tensor) or tensor.retains_grad):
            return None
        gradient: Tensor | None = _torchs_own.__get__(tensor)
    return gradient


def graph_of(tensor: Tensor) -> Any:
    """The node that made a tensor; ``None`` for a leaf, and where torch refuses to say.

    It does of a view made without gradients, once what it is a view of was written to. The
    program's own modes and tensor classes do not see who looks.
    """
    try:
        with torch._C.DisableTorchFunction():
            return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """Whether no node made a tensor; not where torch refuses to say, as of :func:`graph_of`."""
    try:
        with torch._C.DisableTorchFunction():
            return tensor.is_leaf
    except RuntimeError:
        return False


def address(storage: torch.UntypedStorage) -> int | None:
    """Where memory is; ``None`` where it is let go now, or its bytes are still coming.

    Args:
        storage: The memory.
    """
    try:
        return storage.data_ptr() if storage.nbytes() > 0 else None
    except RuntimeError:  # what is said then is `memfit.torch_versions.forbid_reads`'s
        return None


def has_others(storage: torch.UntypedStorage, tensors: int, objects: int = 1) -> bool:
    """Whether memory has owners besides those that the one who asks knows.

    Others are views, what was given away by ``numpy`` or ``dlpack``, and whoever has the storage.

    Args:
        storage: The memory.
        tensors: How many tensors in it are known.
        objects: How many references to ``storage``, Python's object, are known.
    """
    owners, references = _owners(storage)
    alone_owners, alone_references = _alone()
    return owners > alone_owners + tensors - 1 or references > alone_references + objects - 1


def _owners(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Owners of the memory, and references to this object of Python's, as torch counts both."""
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _through(storage: torch.UntypedStorage) -> tuple[int, int]:
    return _owners(storage)  # through as many frames as in `has_others`


@cache
def _alone() -> tuple[int, int]:
    """What :func:`_owners` counts for one tensor and one reference."""
    with torch._C._DisableTorchDispatch():  # as above
        tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return _through(storage)


def viewed(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those parameters of a model whose memory others see too.

    Args:
        parameters: All parameters of the model, behind no barrier.

    Returns:
        Those with a view that somebody keeps: ``parameter.data``, or a parameter of another model.
        Parameters of the same model that share their memory do not count as others.
    """
    sharing: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.layout is torch.strided:
            sharing.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    found = []
    for tensors in sharing.values():
        storage = tensors[0].untyped_storage()
        # torch/csrc/Module.cpp: owners of the memory, this object of Python's among them.
        owners = torch._C._storage_Use_Count(storage._cdata) - 1
        if owners > len(tensors):
            found += tensors
    return found
