"""Which tensors autograd saves, without letting it keep them.

Responsible for the pack and unpack hooks of the recorded step. Not responsible for the lives of
allocations: :mod:`memfit.capture.record.ledger` keeps them.

A packed tensor is replaced by a token that holds no memory of the step, so the storage dies when
everything *else* lets go of it, and its natural range is what the trace needs: alive even if
autograd had saved nothing. Unpacking makes a fresh storage that stands for the same allocation; the
token's own death tells when the node lets go. What existed before the step (parameters, module
buffers, the batch) is handed back as it is.

Where the step runs on fake tensors, the fresh storage has a size and no contents. Where it runs on
real ones, the token keeps a copy of the contents that the recorder does not count, in memory or
elsewhere.

Backward reads what a storage holds by then. torch refuses a tensor whose version counter says that
it was written to since, but a write through ``.data`` has another counter: what such a write left
is what the token keeps, and the save is of that version.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.capture.record.ledger import Ledger
from memfit.tensors.shape_saves import ShapeSave, ShapeSaves, blank_storage
from memfit.tensors.storage import address, is_wrapper, may_change_unseen
from memfit.tensors.versions import counter_of, version_of


@dataclass(slots=True)
class Save:
    """One tensor that autograd packed.

    Attributes:
        value: What is saved.
        allocation: Its allocation.
        sequence: Sequence number of the node that saved it.
        pack: Position of the pack.
        unpack: Position at which backward first asked for its elements; ``None`` when it never did.
        release: Position at which the node let go; ``None`` while it has not.
    """

    value: int
    allocation: int
    sequence: int
    pack: int
    unpack: int | None = None
    release: int | None = None


class Contents(Protocol):
    """Bytes of a storage at one version, shared by every token that needs them."""

    @property
    def storage(self) -> torch.UntypedStorage:
        """A storage that holds them."""


class InMemory:
    """Contents in memory that the recorder does not count."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Copy a storage."""
        self.storage: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]


class Token:
    """What autograd holds instead of a tensor; its death is the release of the save."""

    __slots__ = (
        "__weakref__",
        "_released",
        "contents",
        "counter",
        "save",
        "shape_save",
        "tensor",
        "version",
        "view",
    )

    def __init__(self, save: Save, released: Callable[[Save], None]) -> None:
        """Create a token that refers to nothing but its save."""
        self.save = save
        self.tensor: Tensor | None = None
        self.view: tuple[Any, ...] = ()
        self.contents: Contents | None = None
        self.shape_save: ShapeSave | None = None
        self.counter: Tensor | None = None
        self.version = -1
        self._released = released

    def is_counted_since(self) -> bool:
        """Whether torch has counted a write since: it refuses the tensor, then."""
        return self.counter is not None and version_of(self.counter) != self.version

    def release(self) -> None:
        """Let go of whatever the token refers to, as the death of its node would."""
        self.tensor = None
        self.contents = None
        self._released(self.save)

    def __del__(self) -> None:
        """Tell that the node let go."""
        self._released(self.save)


class SavedTensors:
    """The hooks and what they saw.

    Attributes:
        saves: Every pack, in order.
        shape_saves: Finds those of which backward may read the shape alone.
        unpacked: ``id`` of the tensor handed out last, until the next op; autograd may emit a
            ``detach`` of it that belongs to the hook and not to the step.
    """

    def __init__(
        self,
        ledger: Ledger,
        fake_mode: FakeTensorMode | None,
        *,
        lean: bool,
        keep: Callable[[torch.UntypedStorage], Contents] = InMemory,
    ) -> None:
        """Create the hooks.

        Args:
            ledger: Registers allocations and values.
            fake_mode: Makes the fresh tensors of a step on fakes; ``None`` for a real step.
            lean: Whether tokens hold no memory; otherwise they keep the tensor, as autograd does.
            keep: Keeps the contents of storages of a real step.
        """
        self._keep = keep
        self.saves: list[Save] = []
        self.shape_saves = ShapeSaves()
        self.unpacked: int | None = None
        self._ledger = ledger
        self._fake_mode = fake_mode
        self._lean = lean
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._contents: weakref.WeakValueDictionary[tuple[int, int], Contents] = (
            weakref.WeakValueDictionary()
        )
        self._tokens: dict[int, list[Token]] | None = None
        self._tokens_of: defaultdict[int, list[weakref.ref[Token]]] = defaultdict(list)
        self._writes: list[tuple[torch.UntypedStorage, int]] = []
        self._foreign: Callable[[Tensor], Tensor] | None = None

    def convert_foreign_with(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Use ``convert`` to make a fake of a real tensor that reaches autograd from outside."""
        self._foreign = convert

    def file_by_node(self) -> None:
        """Keep tokens by node, so that :meth:`release_node` can empty them."""
        self._tokens = {}

    def release_node(self, sequence: int) -> None:
        """Empty the tokens of a node that has run.

        Args:
            sequence: Sequence number of the node.
        """
        if self._tokens is not None:
            for token in self._tokens.pop(sequence, ()):
                token.release()

    def hooks(self) -> Any:
        """The context manager that puts the hooks in."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def held(self) -> list[tuple[int, list[Token]]]:
        """What nodes still keep, by allocation: its number, and the tokens that stand for it."""
        alive = (
            (allocation, [token for ref in refs if (token := ref()) is not None])
            for allocation, refs in self._tokens_of.items()
        )
        return [
            (allocation, kept)
            for allocation, tokens in alive
            if (kept := [token for token in tokens if token.save.release is None])
        ]

    def close(self, end: int) -> None:
        """End the step: what no node let go of is released at ``end``."""
        self.settle_writes()
        for save in self.saves:
            if save.release is None:
                save.release = end
        self._storages.clear()
        self._tokens = None
        self._tokens_of.clear()

    def written(self, storage: torch.UntypedStorage, allocation: int) -> None:
        """Take note of a write. torch counts it after the op's mode has returned, if it does.

        Args:
            storage: What an op has written to.
            allocation: Its allocation, at its new version.
        """
        if allocation in self._tokens_of:
            self._writes.append((storage, allocation))

    def settle_writes(self) -> None:
        """Let what was saved be what the last op wrote there without torch counting it."""
        writes, self._writes = self._writes, []
        for storage, allocation in writes:
            for reference in self._tokens_of[allocation]:
                token = reference()
                if token is None or token.is_counted_since():
                    continue
                token.save.value = self._ledger.written_value(token.save.value)
                if token.contents is not None:
                    token.contents = self.contents(storage, allocation)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds instead of a tensor that it saves."""
        self.settle_writes()
        ledger = self._ledger
        if is_wrapper(type(tensor)):
            return tensor  # autograd holds it, and with it what it wraps
        if self._fake_mode is not None and not isinstance(tensor, FakeTensor) and self._foreign:
            tensor = self._foreign(tensor)
        try:
            allocation = ledger.seen(tensor)
            value = ledger.value(tensor, allocation)
        except (RuntimeError, NotImplementedError):
            return tensor
        sequence = torch._C._autograd._get_sequence_nr() - 1
        save = Save(value, allocation, sequence, ledger.now)
        self.saves.append(save)
        token = Token(save, self._released)
        self.shape_saves.packed(tensor, token)
        is_real = self._fake_mode is None
        if ledger.static[allocation] or not self._lean or (is_real and may_change_unseen(tensor)):
            token.tensor = tensor
        else:
            token.view = (
                tensor.dtype,
                tensor.storage_offset(),
                tuple(tensor.shape),
                tensor.stride(),
                tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device,
            )
            storage = tensor.untyped_storage()
            self._storages[allocation] = weakref.ref(storage)
            if self._fake_mode is None:
                token.contents = self.contents(storage, allocation)
            token.counter, token.version = counter_of(tensor), version_of(tensor)
            self._tokens_of[allocation].append(weakref.ref(token))
        if self._tokens is not None:
            self._tokens.setdefault(sequence, []).append(token)
        return token

    def unpack(self, token: Any) -> Tensor:
        """The tensor that autograd saved."""
        self.settle_writes()
        if isinstance(token, Tensor):
            self.unpacked = id(token)
            return token
        save: Save = token.save
        is_blank = token.shape_save is not None and token.shape_save.is_asked_for()
        if save.unpack is None and not is_blank:
            save.unpack = self._ledger.now
        tensor: Tensor | None = token.tensor
        if tensor is None:
            tensor = self._stand_in(token, is_blank=is_blank)
        self.unpacked = id(tensor)
        return tensor

    def let_go(self, token: Token) -> Tensor | None:
        """Have a node of a real step let go of a tensor before its last op.

        Args:
            token: What it holds.

        Returns:
            A tensor of the saved view whose elements are never read; ``None`` where it stays, as
            what was there before the step does.
        """
        if token.tensor is not None:
            return None
        blank = self._stand_in(token, is_blank=True)
        token.release()
        return blank

    def _released(self, save: Save) -> None:
        if save.release is None and not self._ledger.closing:
            save.release = self._ledger.now

    def _stand_in(self, token: Token, *, is_blank: bool) -> Tensor:
        """A tensor of the saved view, on a storage that carries the saved allocation's id.

        Args:
            token: What autograd held.
            is_blank: Whether its elements are never read; then it takes no memory.
        """
        allocation = token.save.allocation
        dtype, offset, shape, stride, device = token.view
        with torch._C._DisableTorchDispatch():
            reference = self._storages.get(allocation)
            storage = reference() if reference is not None else None
            if is_blank:
                storage = self._blank_storage(allocation)
            elif storage is None or not self._is_as_saved(storage, token):
                storage = self._fresh_storage(token, allocation)
            plain = torch.empty(0, dtype=dtype, device=storage.device)
            plain.set_(storage, offset, shape, stride)
            if self._fake_mode is None:
                return plain
            return FakeTensor(self._fake_mode, plain, device)

    def _is_as_saved(self, storage: torch.UntypedStorage, token: Token) -> bool:
        """Whether a storage that something still holds is what was saved: no copy of it then."""
        if token.contents is None:
            return True
        if address(storage) is None:
            return False  # a parameter of another model, which is offloaded, or just coming
        allocation, version = self._ledger.values[token.save.value][:2]
        known = (self._ledger.bytes[allocation], self._ledger.version[allocation])
        return known == (storage.nbytes(), version)

    def _fresh_storage(self, token: Token, allocation: int) -> Any:
        size = self._ledger.bytes[allocation]
        if token.contents is not None:
            storage = token.contents.storage
            if self._ledger.holds(storage):
                return storage
        else:
            storage = torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
            self._storages[allocation] = weakref.ref(storage)
        self._ledger.stand_in(storage, allocation)
        return storage

    def _blank_storage(self, allocation: int) -> torch.UntypedStorage:
        size = self._ledger.bytes[allocation]
        if self._fake_mode is None:
            storage = blank_storage(size)
        else:
            storage = torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
        self._ledger.stand_in(storage, allocation, takes_memory=False)
        return storage

    def contents(self, storage: Any, allocation: int) -> Contents:
        """The bytes of a storage as they are now, for all who need them.

        Args:
            storage: The storage.
            allocation: Its allocation.
        """
        key = (allocation, self._ledger.version[allocation])
        contents = self._contents.get(key)
        if contents is None:
            with torch._C._DisableTorchDispatch():
                contents = self._contents[key] = self._keep(storage)
        return contents
