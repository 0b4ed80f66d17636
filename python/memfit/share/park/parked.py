"""A model that can be parked, and :func:`park`.

Responsible for the order in which things happen, and for undoing what was begun when one fails.
Not responsible for when to park (:mod:`memfit.share.pool`).

Invariant: tensors of the model can be used if and only if all of their bytes are in memory, and
were compared with the hash that they were kept under.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit import _native
from memfit.errors import ParkError, UsageError
from memfit.share.park import cuda_memory, layout
from memfit.share.park.cuda_memory import CudaMemory
from memfit.share.park.streaming import needed_at_once
from memfit.sizes import Size, in_bytes
from memfit.tensors.barrier import Barrier, owner_of, without_barrier


@dataclass(frozen=True, slots=True)
class ParkStatistics:
    """What a model's parking did so far.

    Attributes:
        parks: Times that it was parked.
        wakes: Times that it was woken.
        bytes_written: Bytes written to the disk.
        bytes_unchanged: Bytes not written because the disk had them from before.
        bytes_in_source: Bytes not written because the weights file has them.
        bytes_to_host: Bytes of a GPU's memory kept in the host's.
        bytes_read: Bytes read and compared: none of those that stayed in memory all the time.
        park_seconds: What parking took.
        wake_seconds: What waking took.
    """

    parks: int
    wakes: int
    bytes_written: int
    bytes_unchanged: int
    bytes_in_source: int
    bytes_read: int
    park_seconds: float
    wake_seconds: float
    bytes_to_host: int = 0


class ParkedModel:
    """A model whose parameters, module buffers and optimizer state can step aside.

    As a context manager it is parked inside the block and woken at its end.

    Attributes:
        model: The model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        spill: str | PathLike[str],
        *,
        optimizer: Optimizer | None = None,
        source: str | PathLike[str] | None = None,
        leave: Collection[str] = (),
        host: Size | None = None,
        allow_memory: bool = False,
    ) -> None:
        """Move the model's tensors into memory of their own; it stays awake.

        Args:
            model: The model. For a moment its largest tensor is there twice.
            spill: Folder on a disk for the file that parked bytes go to.
            optimizer: The model's optimizer, whose state steps aside with it.
            source: Safetensors file that the model was loaded from: what has not changed since
                is not written again.
            leave: Names of parameters and module buffers to leave where they are.
            host: For a model on a GPU, most bytes of the host's memory for its parked copy; by
                default half of what is free there when it is parked. The rest goes to the disk.
            allow_memory: Accept a folder whose files are kept in memory.

        Raises:
            ParkError: A tensor cannot be parked, the folder or the file not be used, or the GPU
                has no room for a tensor twice; what was moved by then stays at its new address.
        """
        host_bytes = None if host is None else in_bytes(host, "keep")
        self.model = model
        self._optimizer = optimizer
        self._leave = frozenset(leave)
        self._lock = threading.RLock()
        self._is_closed = False
        self._uses = 0
        self._saved: list[list[int]] | None = None
        _refuse_elsewhere(model)
        found = layout.together(layout.members(model, self._leave, optimizer))
        device = self._device = layout.check(found)
        alignment = layout.ALIGNMENT if device.type == "cpu" else cuda_memory.ALIGNMENT
        self._blocks = layout.blocks(found, alignment)
        _refuse_others(self._blocks)
        _refuse_aliases(self._blocks)
        if not self._blocks:
            message = "the model has no bytes to park"
            raise ParkError(message, "unsupported")
        self._memory = _memory_for(
            device,
            self._blocks,
            fspath(spill),
            None if source is None else fspath(source),
            host_bytes,
            allow_memory=allow_memory,
        )
        if isinstance(self._memory, CudaMemory):
            layout.move(self._blocks, self._memory.place)
        else:
            layout.move(self._blocks, partial(layout.host_place, self._memory))
        self._names = {id(member.tensor): member.names[0] for member in found}
        tensors = [member.tensor for member in found]
        self._barrier = Barrier(tensors, self, self._on_use)
        self._parts = {
            id(member.tensor): (block.start, block.end)
            for block in self._blocks
            for member in block.members
        }
        for block in self._blocks:
            _OWNERS[block.storage.data_ptr()] = self

    @property
    def is_parked(self) -> bool:
        """Whether the model is parked."""
        return self._memory.is_parked

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when awake: whole pages."""
        return self._memory.length

    @property
    def resident_bytes(self) -> int:
        """Bytes that it takes now."""
        return 0 if self.is_parked else self.nbytes

    @property
    def unsaved_bytes(self) -> int:
        """About how many bytes parking would write now: of tensors that torch saw change."""
        with self._lock:
            if self.is_parked:
                return 0
            if self._saved is None:
                return self.nbytes
            with without_barrier():
                pairs = zip(self._blocks, self._saved, self._versions(), strict=True)
            return sum(block.storage.nbytes() for block, old, new in pairs if old != new)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's state, all that there is of it, steps aside with the model."""
        if optimizer is not self._optimizer:
            return False
        known = {id(member.tensor) for block in self._blocks for member in block.members}
        with without_barrier():
            state = layout.state(self.model, optimizer)
            # What takes nothing of the device need not step aside.
            here = (tensor for _, tensor in state if tensor.device == self._device)
            return all(id(tensor) in known or tensor.nbytes == 0 for tensor in here)

    @property
    def statistics(self) -> ParkStatistics:
        """What was done so far."""
        return ParkStatistics(**self._memory.statistics())

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the copy of a parked model on a GPU takes now."""
        return self._memory.host_bytes if isinstance(self._memory, CudaMemory) else 0

    def park(self, *, host: Size | None = None) -> None:
        """Give the memory back; does nothing when it is parked.

        Gradients stay where they are, as does the state of an optimizer that this was not told
        of. No thread may be running the model, other than in a block of :meth:`awake`, which this
        finds out.

        Args:
            host: For a model on a GPU, most bytes of the host's memory for the copy this time; by
                default as it was made.

        Raises:
            ParkError: The model is awake, as before: a block of :meth:`awake` runs (``in_use``),
                something outside the model uses its memory (``aliased``), it was changed
                (``replaced``), or the disk is full (``no_space``).
        """
        host_bytes = None if host is None else in_bytes(host, "keep")
        with self._lock:
            if self.is_parked:
                return
            if self._uses > 0:
                message = f"the model is in use in {self._uses} blocks of `awake()`"
                raise ParkError(message, "in_use")
            if self._is_closed:
                message = "the model is no longer parkable: it was closed"
                raise ParkError(message, "closed")
            # First the barrier: whoever comes later comes too late to be overlooked.
            self._barrier.put_up()
            try:
                with without_barrier():
                    self._check_unchanged()
                    versions = self._versions()
                if isinstance(self._memory, CudaMemory):
                    self._memory.park(host_bytes)
                else:
                    self._memory.park()
                self._saved = versions
            except BaseException:
                # A signal may come when it is done.
                if not self.is_parked:
                    self._barrier.take_down()
                raise

    def wake(self, *, stream: bool = False) -> None:
        """Have every byte back at its address; does nothing when it is awake.

        Args:
            stream: Do not wait for all of them: a thread reads on while the model runs, and each
                tensor is waited for, and compared with its hash, when it is first used. What was
                parked and has changed is then an error of that use. Some are waited for at once:
                those of compiled and scripted modules and of attention that has a fast path; so
                are all on a GPU, or with a weights file as ``source``.

        Raises:
            ParkError: The model is still parked, and whole: there is no memory for it
                (``no_memory``), or what was parked has changed (``changed``).
        """
        with self._lock:
            if self.is_parked and stream and isinstance(self._memory, _native.ParkedMemory):
                self._memory.begin_wake()
                try:
                    if self._memory.is_arriving:
                        self._bring_in(list(needed_at_once(self.model)))
                except BaseException:
                    # Nobody has used any of it yet: whoever does waits for the lock.
                    self._barrier.put_up()
                    self._memory.park()
                    raise
            elif self.is_parked or (self._is_arriving and not stream):
                self._memory.wake()
            # Also where a signal kept the last wake from it.
            if not self._is_arriving:
                self._barrier.take_down()

    def to_disk(self) -> None:
        """Move what the host's memory keeps of a parked model to the disk.

        Does nothing where nothing is: for a model that is awake, or one on the CPU.

        Raises:
            ParkError: The copy stays where it is: the disk is full (``no_space``), say.
        """
        with self._lock:
            if isinstance(self._memory, CudaMemory) and not self._is_closed:
                self._memory.to_disk()

    @contextmanager
    def awake(self) -> Iterator[nn.Module]:
        """Wake the model for a block and park it at its end.

        Several threads may be in such blocks; the last one to leave parks the model.

        Yields:
            The model.

        Raises:
            ParkError: As :meth:`wake` and :meth:`park`.
        """
        with self._lock:
            self.wake()
            self._uses += 1
        try:
            yield self.model
        finally:
            with self._lock:
                self._uses -= 1
                if self._uses == 0:
                    self.park()

    def close(self) -> None:
        """Wake the model and give the room on the disk back; it is an ordinary model then.

        Meanwhile the model may be run, but not trained.

        Raises:
            ParkError: As :meth:`wake`; nothing is closed then.
        """
        with self._lock:
            if self._is_closed:
                return
            self.wake()
            self._memory.give_up()
            self._is_closed = True
            for block in self._blocks:
                _OWNERS.pop(block.storage.data_ptr(), None)
            # The storages are counted no more.
            self._blocks = []

    def __enter__(self) -> Self:
        """Park the model."""
        self.park()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wake the model."""
        self.wake()

    def __repr__(self) -> str:
        """Say what it takes."""
        state = "closed" if self._is_closed else "parked" if self.is_parked else "awake"
        size = _native.bytes_text(self.nbytes)
        return f"<memfit.ParkedModel {type(self.model).__name__}, {size}, {state}>"

    @property
    def _is_arriving(self) -> bool:
        """Whether it is awake and some of it still has to be brought in."""
        return isinstance(self._memory, _native.ParkedMemory) and self._memory.is_arriving

    def _on_use(self, tensors: list[Tensor], _by: object) -> AbstractContextManager[None]:
        """Somebody is about to use tensors that are parked, or on their way."""
        # Without the lock, which in a forked child a thread may hold that is not there.
        if self.is_parked:
            name = next((self._names[id(tensor)] for tensor in tensors), "a parameter")
            message = f"`{name}` was used while its model is parked\nhint: wake the model first"
            raise ParkError(message, "parked", name)
        with self._lock:
            self._bring_in(tensors)
        return nullcontext()

    def _bring_in(self, tensors: list[Tensor]) -> None:
        """Wait for tensors that are on their way, and let them be used; the lock is held."""
        if isinstance(self._memory, _native.ParkedMemory) and self._memory.is_arriving:
            self._memory.bring_in([self._parts[id(t)] for t in tensors if id(t) in self._parts])
        if self.is_parked:  # by another thread, meanwhile
            return
        if not self._is_arriving:
            self._barrier.take_down()
            return
        for tensor in tensors:
            if id(tensor) in self._names:
                self._barrier.let_through(tensor)

    def _versions(self) -> list[list[int]]:
        """How often torch has seen each tensor change, by storage."""
        return [[_version(member.tensor) for member in block.members] for block in self._blocks]

    def _check_unchanged(self) -> None:
        """Refuse to park what is not, or not only, the model's."""
        found = layout.together(layout.members(self.model, self._leave, self._optimizer))
        name = layout.replaced(self._blocks, found)
        if name is not None:
            message = (
                f"`{name}` is not what it was when the model was made parkable\nhint: close it "
                "and park the model anew"
            )
            raise ParkError(message, "replaced", name)
        _refuse_aliases(self._blocks)


def park(
    model: nn.Module,
    spill: str | PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    source: str | PathLike[str] | None = None,
    leave: Collection[str] = (),
    host: Size | None = None,
) -> ParkedModel:
    """Park a model: its parameters and module buffers leave the memory until it is woken.

    Woken, every tensor is the same object with the same bits. The first parking moves tensors into
    memory that can be given back; from then on their addresses never change. Any use of a parked
    model is a :class:`memfit.ParkError`. For a model that was parked before, this parks it
    again and returns the same object; the other arguments do not matter then. Only where the
    optimizer has come to hold state that is not known yet, the model is closed and parked anew.

    Args:
        model: The model, on the CPU or on one GPU.
        spill: Folder on a disk for the file that parked bytes go to; the file has no name, so
            nothing is left when the process ends.
        optimizer: The model's optimizer, whose state steps aside with it: a training job that is
            idle then holds nothing but what Python and torch take themselves. Let its gradients go
            before, with ``zero_grad()``.
        source: Safetensors file that the model was loaded from. What has not changed since is
            read from there again instead of being written.
        leave: Names of parameters and module buffers to leave where they are.
        host: For a model on a GPU, most bytes of the host's memory for its parked copy
            (``"20GiB"``); by default half of what is free there. The rest goes to the disk.

    Returns:
        The parked model. ``with memfit.park(...):`` wakes it at the end of the block.

    Raises:
        ParkError: It cannot be parked, and is as before.
        UsageError: ``model`` is no module, or ``host`` no size.
    """
    if not isinstance(model, nn.Module):
        message = f"`model` must be an `nn.Module`, got `{type(model).__name__}`"
        raise UsageError(message)
    _refuse_elsewhere(model)
    parked = _owner(model)
    if parked is not None and (optimizer is None or parked.knows(optimizer)):
        parked.park()
        return parked
    if parked is not None:
        parked.close()
    parked = ParkedModel(model, spill, optimizer=optimizer, source=source, leave=leave, host=host)
    try:
        parked.park()
    except BaseException:
        parked.close()
        raise
    return parked


def _memory_for(
    device: torch.device,
    laid: list[layout.Block],
    spill: str,
    source: str | None,
    host_bytes: int | None,
    *,
    allow_memory: bool,
) -> _native.ParkedMemory | CudaMemory:
    """Memory for storages on a device."""
    length = laid[-1].end
    if device.type == "cpu":
        ranges = [part for block in laid for part in layout.ranges(block)]
        return _native.ParkedMemory(length, ranges, spill, source, allow_memory=allow_memory)
    if source is not None:
        message = (
            f"`source` is for models on the CPU, and this one is on `{device}`\nhint: leave it "
            "out: the copy goes to the host's memory, and what finds no room there to `spill`"
        )
        raise ParkError(message, "unsupported")
    return CudaMemory(length, device, spill, host_bytes=host_bytes, allow_memory=allow_memory)


def _version(tensor: Tensor) -> int:
    """How often torch has seen a tensor change; 0 where it does not watch."""
    try:
        return tensor._version
    except RuntimeError:  # made under inference mode
        return 0


_OWNERS: WeakValueDictionary[int, ParkedModel] = WeakValueDictionary()
"""Who can park which storage, by its address."""


def _owner(model: nn.Module) -> ParkedModel | None:
    """Who made the model parkable, if somebody did and can still wake it."""
    with without_barrier():
        for tensor in (*model.parameters(), *model.buffers()):
            if layout.obstacle(tensor) is None:
                owner = _OWNERS.get(tensor.untyped_storage().data_ptr())
                if owner is not None and owner.model is model:
                    return owner
    return None


def _refuse_elsewhere(model: nn.Module) -> None:
    """Refuse a model whose bytes a plan keeps elsewhere: looking for them would end the process."""
    for name, parameter in model.named_parameters():
        owner = owner_of(parameter)
        if owner is not None and not isinstance(owner, ParkedModel):
            message = (
                f"cannot park `{name}`: memfit's plan has offloaded it\n"
                "hint: close what `memfit.fit` returned first, or fit with "
                '`forbid=["offload_parameters"]`'
            )
            raise ParkError(message, "unsupported", name)


def _refuse_others(blocks: list[layout.Block]) -> None:
    """Refuse tensors that another parked model has."""
    for block in blocks:
        owner = _OWNERS.get(block.storage.data_ptr())
        if owner is not None:
            name = block.members[0].names[0]
            message = (
                f"cannot park `{name}`: it belongs to {owner!r} already\nhint: use that one's "
                "`park()` and `wake()`, or close it first"
            )
            raise ParkError(message, "aliased", name)


def _refuse_aliases(blocks: list[layout.Block]) -> None:
    """Refuse tensors whose memory is used outside the model."""
    name = layout.stray(blocks)
    if name is not None:
        message = (
            f"cannot park `{name}`: a tensor outside the model uses its memory\nhint: let it go "
            "(a view, a state dict, a loss that was not run backward)"
        )
        raise ParkError(message, "aliased", name)
