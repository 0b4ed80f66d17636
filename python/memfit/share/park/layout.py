"""Which tensors of a model are parked, and where they lie in one piece of memory.

Responsible for finding parameters, module buffers and the tensors of an optimizer's state, for
refusing by name what cannot be parked, and for moving storages without changing who shares what.
Not responsible for the memory.

A model is moved storage by storage: tied weights and views of one storage stay what they are, and
every ``Parameter`` stays the object that optimizers hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.errors import ParkError
from memfit.guard import overhead

ALIGNMENT = 64
"""What torch's own allocator aligns storages on a CPU to."""


@dataclass(slots=True)
class Member:
    """A parameter, a module buffer or a tensor of the optimizer's state.

    Attributes:
        tensor: The tensor itself.
        names: Its names in the model, more than one if it is tied; of state, ``exp_avg of weight``.
    """

    tensor: Tensor
    names: list[str]


@dataclass(slots=True)
class Block:
    """One storage of the model.

    Attributes:
        storage: The storage; holding it keeps the aliases countable.
        members: The model's tensors on it.
        start: Its first byte in the memory.
    """

    storage: torch.UntypedStorage
    members: list[Member] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        """Its end in the memory."""
        return self.start + self.storage.nbytes()


def members(
    model: nn.Module, leave: Collection[str] = (), optimizer: Optimizer | None = None
) -> list[Member]:
    """Find a model's parameters and module buffers, and what an optimizer keeps for them.

    Args:
        model: The model.
        leave: Names to leave out.
        optimizer: Whose state to find as well.

    Returns:
        Each tensor once, with all its names.

    Raises:
        ParkError: A name in ``leave`` is none of the model's.
    """
    unknown = set(leave)
    found: dict[int, Member] = {}
    for name, tensor in (*_named(model), *state(model, optimizer)):
        if name in unknown:
            unknown.discard(name)
            continue
        found.setdefault(id(tensor), Member(tensor, [])).names.append(name)
    if unknown:
        name = min(unknown)
        message = f"the model has no parameter or module buffer `{name}` to leave"
        raise ParkError(message, "unsupported", name)
    return list(found.values())


def state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Name the tensors that an optimizer keeps.

    Args:
        model: Whose parameters it is for.
        optimizer: The optimizer, if there is one.

    Yields:
        Each tensor and its name: its key and the parameter it is for.
    """
    if optimizer is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        owner = names.get(id(parameter), "a parameter of another model")
        for key, value in kept.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            for number, tensor in enumerate(tensors):
                # Of a list, as `LBFGS` keeps, each tensor has a name of its own.
                part = f"{key}[{number}]" if len(tensors) > 1 else key
                yield f"{part} of {owner}", tensor


def together(found: list[Member]) -> list[Member]:
    """Choose what is parked of a model that is on a GPU: what takes the GPU's memory.

    What such a model has on the host, as the step counts of most optimizers, stays where it is.

    Args:
        found: A model's tensors.

    Returns:
        Those on GPUs if there are any, else all.
    """
    return [member for member in found if member.tensor.is_cuda] or found


def check(found: list[Member]) -> torch.device:
    """Refuse tensors that have no storage of their own, or not all of them on one device.

    Args:
        found: The model's tensors.

    Returns:
        The device.

    Raises:
        ParkError: One cannot be parked; it is named.
    """
    for member in found:
        why = obstacle(member.tensor) or _elsewhere(member, found[0])
        if why is not None:
            name = member.names[0]
            message = f"cannot park `{name}`: {why}"
            raise ParkError(message, "unsupported", name)
    return found[0].tensor.device if found else torch.device("cpu")


def obstacle(tensor: Tensor) -> str | None:
    """Say why a tensor cannot be parked.

    Args:
        tensor: One of a model's or of its optimizer's.

    Returns:
        What is the matter, and a hint; ``None`` if it can be.
    """
    for applies, what in _OBSTACLES:
        if applies(tensor):
            return what.format(kind=type(tensor).__name__, tensor=tensor)
    return None


def blocks(found: list[Member], alignment: int = ALIGNMENT) -> list[Block]:
    """Lay the storages of tensors out one behind the other.

    Args:
        found: The model's tensors, checked.
        alignment: What each is aligned to.

    Returns:
        A block for each storage that has bytes.
    """
    laid: dict[int, Block] = {}
    end = 0
    for member in found:
        storage = member.tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        block = laid.get(storage._cdata)
        if block is None:
            block = laid[storage._cdata] = Block(storage, start=end)
            end = -(-block.end // alignment) * alignment
        block.members.append(member)
    return list(laid.values())


def ranges(block: Block) -> list[tuple[list[str], int, int]]:
    """Names, start and length of what the model uses of a storage, in the memory.

    Tensors that overlap become one range without a name.

    Args:
        block: The storage and its tensors.

    Returns:
        The ranges, in order.
    """
    parts: list[tuple[int, int, list[str]]] = []
    for member in block.members:
        tensor = member.tensor
        if tensor.numel() == 0:
            continue
        start = int(tensor.storage_offset()) * tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((int(size) - 1) * int(stride) for size, stride in steps)
        length = (last + 1) * tensor.element_size()
        names = member.names if tensor.is_contiguous() else []
        parts.append((start, start + length, names))
    merged: list[tuple[int, int, list[str]]] = []
    for start, end, names in sorted(parts):
        if merged and start < merged[-1][1]:
            before = merged.pop()
            is_same = before[:2] == (start, end) and before[2] and names
            both = [*before[2], *names] if is_same else []
            merged.append((before[0], max(before[1], end), both))
        else:
            merged.append((start, end, names))
    return [(names, block.start + start, end - start) for start, end, names in merged]


RELEASE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""How much of what was moved allocators may keep, before they are told to let it go: on a GPU that
waits for the device."""


def host_place(memory: _native.ParkedMemory, block: Block) -> Tensor:
    """Memory of the host for a storage, as bytes.

    Args:
        memory: The memory.
        block: The storage.

    Returns:
        A tensor of its length, which holds the memory.
    """
    place = (ctypes.c_char * block.storage.nbytes()).from_address(memory.address + block.start)
    # The storage holds the array, and the array the memory: it outlives the storage.
    place.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(place, dtype=torch.uint8)


def move(laid: list[Block], place: Callable[[Block], Tensor]) -> None:
    """Move storages into the memory, each in its turn, so that little is there twice.

    Where a place cannot be had, what has moved stays there: the model can be used, in part at new
    addresses.

    Args:
        laid: The storages; each block has its new one afterwards.
        place: Gives the memory for a storage, as bytes.
    """
    freed_bytes = 0
    for block in laid:
        # What is made for inference would make the model's tensors such, which nothing trains.
        with torch.no_grad(), torch.inference_mode(mode=False):
            target = place(block)
            device = target.device
            source = torch.empty(0, dtype=torch.uint8, device=device).set_(block.storage)
            target.copy_(source)
            del source
            storage = target.untyped_storage()
            for member in block.members:
                tensor = member.tensor
                offset, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
                empty = torch.empty(0, dtype=tensor.dtype, device=device)
                # Keeps the object, its gradient, its hooks and its version.
                tensor.data = empty.set_(storage, offset, shape, strides)
        block.storage = storage
        freed_bytes += storage.nbytes()
        if freed_bytes >= RELEASE_BYTES[device.type] or block is laid[-1]:
            # Else the old bytes stay in the process, kept for requests that do not come.
            overhead.release("host" if device.type == "cpu" else str(device))
            freed_bytes = 0


def stray(laid: list[Block]) -> str | None:
    """Name a tensor whose storage somebody outside the model uses too.

    Args:
        laid: The storages, each held by its block.

    Returns:
        The name, or ``None``.
    """
    for block in laid:
        # One for each of the model's tensors and one for the block's own.
        expected = len(block.members) + 1
        if torch._C._storage_Use_Count(block.storage._cdata) > expected:
            return block.members[0].names[0]
    return None


def replaced(laid: list[Block], found: list[Member]) -> str | None:
    """Name a tensor of the model that is not what was moved.

    Args:
        laid: What was moved.
        found: The model's tensors now.

    Returns:
        The name, or ``None``.
    """
    storages = {id(member.tensor): block.storage for block in laid for member in block.members}
    present = set()
    for member in found:
        present.add(id(member.tensor))
        storage = member.tensor.untyped_storage()
        known = storages.get(id(member.tensor))
        if storage.nbytes() > 0 and (known is None or known._cdata != storage._cdata):
            return member.names[0]
    gone = (m.names[0] for block in laid for m in block.members if id(m.tensor) not in present)
    return next(gone, None)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter and module buffer."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _elsewhere(member: Member, first: Member) -> str | None:
    """Why a tensor is not on the device of the first, if it is not."""
    device, expected = member.tensor.device, first.tensor.device
    if device == expected:
        return None
    return (
        f"it is on `{device}`, and `{first.names[0]}` on `{expected}`: a parked model is on one "
        f"device\nhint: {_LEAVE}"
    )


def _is_subclass_with_dispatch(tensor: Tensor) -> bool:
    """Whether its bytes are elsewhere, in tensors that its class knows."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


_LEAVE = "leave it where it is with `leave=[...]`"
_OBSTACLES: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (nn.parameter.is_lazy, "it has no shape yet\nhint: run the model once"),
    (
        _is_subclass_with_dispatch,
        f"it is a `{{kind}}`, which keeps its bytes in other tensors\nhint: {_LEAVE}",
    ),
    (
        lambda tensor: tensor.device.type == "meta",
        "it is on `meta` and has no bytes\nhint: load its weights first",
    ),
    (
        lambda tensor: tensor.device.type not in {"cpu", "cuda"},
        (
            "it is on `{tensor.device}`, and only memory of the host and of CUDA devices can be "
            f"parked\nhint: move the model with `model.cpu()`, or {_LEAVE}"
        ),
    ),
    (
        lambda tensor: tensor.layout is not torch.strided or tensor.is_quantized,
        f"it is {{tensor.layout}} of {{tensor.dtype}}, not plain memory\nhint: {_LEAVE}",
    ),
    (
        lambda tensor: tensor.is_conj() or tensor.is_neg(),
        "it is a conjugate or negative view\nhint: resolve it first",
    ),
    (
        lambda tensor: tensor.is_cpu and tensor.untyped_storage().is_shared(),
        f"its memory is shared with other processes\nhint: {_LEAVE}",
    ),
    (
        lambda tensor: tensor.is_cpu and torch.cuda.is_available() and tensor.is_pinned(),
        f"its memory is pinned for a GPU\nhint: {_LEAVE}",
    ),
)
"""What cannot be parked and why, asked in order."""
