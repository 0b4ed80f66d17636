"""An optimizer's step in which only what each op touches is in memory.

Of an optimizer that is not torch's own nobody knows whether it updates each parameter alone, so
nothing but its own step may make its updates. But it makes them op by op. Responsible for having in
memory what an op is given, and for sending away what no op was given for longest where there is no
room. Not responsible for which steps run so, nor for what becomes of state and gradients afterwards
(:mod:`memfit.run.script.foreign_optimizers`).

The memory of a tensor is let go by making its storage empty, and comes back into the same storage:
views, whoever made them, find the bytes. What reaches bytes by no op (``numpy()``, ``data_ptr()``)
is seen as torch sees it, has them, and keeps them to the end of the step; code that torch does not
see gets an error in place of a wrong byte. So before a first step has shown that the optimizer
writes by torch's ops, only what an op has touched may go.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.offload.mapped import LEAST_BYTES, exchange_memory, in_file, is_lent, may_exchange
from memfit.run.script.contexts import Nesting
from memfit.tensors.function_modes import take_off, torchs_own
from memfit.tensors.storage import address, has_others, is_from_allocator
from memfit.torch_versions import allow_reads, forbid_reads

_KINDS = (Tensor, nn.Parameter, nn.Buffer)

_TO_BYTES: tuple[str, ...] = (
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__reduce_ex__",
    "_typed_storage",
    "data_ptr",
    "is_shared",
    "numpy",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
)
"""Methods of tensors that reach their bytes, or their memory, by no op."""

_WIDEST = 4
"""Bytes of an element that is made of nothing, mostly."""

_TO_BYTES_OF = frozenset(getattr(Tensor, name) for name in _TO_BYTES)


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that may be elsewhere.

    Attributes:
        storage: Its storage, weakly.
        size_bytes: Its bytes when they are there.
        in_file: A mapped file with its bytes; ``None`` where they never went, or were written to.
        is_away: Whether they are in the file alone.
        may_go: Whether they may be.
        once_written: Whether they may only once an op has written to them.
    """

    storage: weakref.ref[Any]
    size_bytes: int
    in_file: torch.UntypedStorage | None = None
    is_away: bool = False
    may_go: bool = False
    once_written: bool = False


class DemandPaging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a step runs inside, from :meth:`begin` to :meth:`leave`.

    Attributes:
        written: Storages, by identity, that ops have written to.
        gave_address: Whether somebody was given an address, which he may keep.
    """

    carries_out_ops = True

    def __init__(self, place: str, budget_bytes: int, name: str) -> None:
        """Know of no memory yet.

        Args:
            place: Where files lie.
            budget_bytes: What is to be live at most.
            name: Of the optimizer, for errors.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.gave_address = False
        self._place = place
        self._budget_bytes = budget_bytes
        self._message = f"this memory is in a file of memfit's while `{name}` steps"
        self._known: dict[int, _Memory] = {}  # in the order of their last uses
        self._took: dict[Any, float] = {}
        self._is_full = False
        self._is_on = False
        self._inside = False
        self._nesting: Nesting | None = None
        self._looks = _Looks(self)
        self._window = _native.AllocationWindow()

    def manage(
        self,
        tensors: Iterable[Tensor],
        *,
        at_once: bool,
        once_written: bool = False,
        owners: int = 1,
    ) -> None:
        """Have the memory of some tensors elsewhere, where there is no room for it.

        Args:
            tensors: The tensors.
            at_once: Whether it may go before an op has touched it.
            once_written: Whether it may only once an op has written to it.
            owners: How many owners of each are known, as :func:`is_lent` takes it.
        """
        for tensor in tensors:
            # What requires gradients a graph may have, and `dlpack` lends no such tensor itself.
            may_go = tensor.requires_grad or not is_lent(tensor, owners)
            if may_go and is_managed(tensor):
                memory = self._know(tensor.untyped_storage())
                memory.may_go = at_once
                memory.once_written = once_written and not at_once

    def begin_in_file(self, tensor: Tensor, moves: Callable[..., None] | None) -> None:
        """Manage a tensor that is in a mapped file now, and in memory for who touches it.

        Args:
            tensor: One that may come back, see :mod:`memfit.run.script.held_in_files`.
            moves: Told of it before it has other memory; ``None`` for nobody.
        """
        with torch._C._DisableTorchDispatch():
            mapped = tensor.untyped_storage()
            own = torch.UntypedStorage(mapped.nbytes())  # type: ignore[no-untyped-call]
            if moves is not None:
                moves(tensor, own)
            exchange_memory(tensor, own)
            memory = self._know(own)
            memory.in_file, memory.may_go = mapped, True
            self._let_go(memory, own)

    def begin(self) -> None:
        """From here on, ops find what they are given."""
        self._looks.__enter__()  # type: ignore[no-untyped-call]
        self.__enter__()  # type: ignore[no-untyped-call]
        self._nesting = Nesting()
        self._is_on = True

    def leave(self) -> None:
        """Be told of no more ops."""
        nesting, self._nesting = self._nesting, None
        if nesting is not None:
            self._is_on = False
            with nesting.cleared():
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            take_off(self._looks)
            self._window.close()

    def stay_in_files(
        self, tensors: Iterable[tuple[Tensor, int]], moves: Callable[..., None] | None
    ) -> None:
        """Give tensors whose memory is away the mapped files for good; others have theirs.

        Args:
            tensors: They, with how many owners each has: Python's object, and others known.
            moves: As :meth:`begin_in_file`.
        """
        for tensor, owners in tensors:
            if not may_exchange(tensor):
                continue
            storage = tensor.untyped_storage()
            memory = self._known.get(storage._cdata)
            if memory is None or memory.in_file is None or is_lent(tensor, owners):
                continue
            if has_others(storage, 1):
                continue
            if moves is not None:
                moves(tensor, memory.in_file)
            exchange_memory(tensor, memory.in_file)
            del self._known[storage._cdata]
            if memory.is_away:
                allow_reads(storage)  # nobody has it

    def bring_back(self) -> None:
        """Have the rest in memory."""
        for memory in list(self._known.values()):
            self._have(memory)
        self._known.clear()

    @property
    def away_bytes(self) -> int:
        """Bytes that are in files alone now."""
        return sum(it.size_bytes for it in self._known.values() if it.is_away)

    # In the step

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, with all that it is given in memory."""
        kwargs = kwargs or {}
        if not self._is_on or self._inside:
            return func(*args, **kwargs)
        count = _elements(func, args, kwargs)
        if not count:
            return self._run(func, args, kwargs)
        # On a CPU torch makes those of a list one after the other, too.
        found = [
            self._run(
                func,
                _nth(args, number),
                dict(zip(kwargs, _nth(kwargs.values(), number), strict=True)),
            )
            for number in range(count)
        ]
        return [one for of in found for one in of] if func._schema.returns else None

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, written = _given(func, args, kwargs)
        given_bytes = sum(it.nbytes for it in given)
        touched: list[_Memory] = []
        self._inside = True
        try:
            touched = self._touched(given)
            guess = int(self._took.get(func, 0.0) * given_bytes)
            self._make_room(max(_made(func, given, args), guess), touched)
            for memory in touched:
                self._have(memory)
            for tensor in written:
                self._is_written(tensor)
            self._window.restart()
            before = _native.counted_bytes()
        except Exception:  # noqa: BLE001 - the script goes on, with all in memory
            self.bring_back()
            self._is_on = False
            return func(*args, **kwargs)
        finally:
            self._inside = False
        result = func(*args, **kwargs)
        self._inside = True
        try:
            if given_bytes:
                took = max(self._window.peak()[0] - before, 0) / given_bytes
                self._took[func] = max(self._took.get(func, 0.0), took)
            self._learn(func, args, kwargs, result, touched)
        finally:
            self._inside = False
        return result

    def _touched(self, given: list[Tensor]) -> list[_Memory]:
        """The memory of what an op is given, which was used last from here on."""
        found = []
        for key in dict.fromkeys(it.untyped_storage()._cdata for it in given):
            memory = self._known.pop(key, None)
            if memory is not None:
                self._known[key] = memory
                memory.may_go = memory.may_go or not memory.once_written
                found.append(memory)
        return found

    def _is_written(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        self.written.add(key)
        memory = self._known.get(key)
        if memory is not None:
            memory.in_file, memory.may_go = None, True

    def _learn(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        touched: list[_Memory],
    ) -> None:
        """Know what an op has made, or has given another size."""
        if any(map(_is_of_parts, tree_leaves((args, kwargs, result)))):
            self._stay(touched)  # as the values of a sparse tensor, which others are given
            return
        made = tree_leaves(result) if _makes(func) else ()
        for leaf in made:
            if isinstance(leaf, Tensor) and is_managed(leaf, owners=None):
                self._know(leaf.untyped_storage()).may_go = True
        for memory in touched:
            storage = memory.storage()
            if storage is not None and storage.nbytes() != memory.size_bytes:
                memory.size_bytes, memory.in_file = storage.nbytes(), None

    def _stay(self, memories: Iterable[_Memory]) -> None:
        """Have memory for good."""
        for memory in memories:
            self._have(memory)
            for key in [key for key, it in self._known.items() if it is memory]:
                del self._known[key]

    def _know(self, storage: torch.UntypedStorage) -> _Memory:
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            ref = weakref.ref(storage, lambda gone: self._forget(key, gone))
            known = self._known[key] = _Memory(ref, storage.nbytes())
        return known

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known.storage is gone:
            del self._known[key]

    def _make_room(self, more_bytes: int, touched: list[_Memory]) -> None:
        """Send away what was used longest ago, until there is room for more and for what comes."""
        more_bytes += sum(it.size_bytes for it in touched if it.is_away)
        lacking = _native.counted_bytes() + more_bytes - self._budget_bytes
        for memory in self._idle(touched) if lacking > 0 and not self._is_full else ():
            if not self._send(memory):
                return
            lacking -= memory.size_bytes
            if lacking <= 0:
                return

    def _idle(self, touched: list[_Memory]) -> Iterator[_Memory]:
        for memory in list(self._known.values()):
            if memory.may_go and not memory.is_away and memory not in touched:
                yield memory

    def _send(self, memory: _Memory) -> bool:
        storage = memory.storage()
        if storage is None or not storage.resizable():
            memory.may_go = False
            return True
        with torch._C._DisableTorchDispatch():
            try:
                memory.in_file = memory.in_file or in_file(storage, self._place)
            except (OSError, RuntimeError):
                self._is_full = True  # the rest stays
                return False
            self._let_go(memory, storage)
        return True

    def _let_go(self, memory: _Memory, storage: torch.UntypedStorage) -> None:
        memory.is_away = True
        storage.resize_(0)
        forbid_reads(storage, self._message)

    def _have(self, memory: _Memory) -> None:
        storage = memory.storage()
        if not memory.is_away or storage is None:
            return
        assert memory.in_file is not None, "it is there that it is"
        with torch._C._DisableTorchDispatch():
            allow_reads(storage)
            storage.resize_(memory.size_bytes)
            storage.copy_(memory.in_file)
        memory.is_away = False

    def is_reached(self, tensors: Iterable[Any], *, keeps_address: bool) -> None:
        """Somebody is about to reach the bytes of tensors by no op: they stay.

        Args:
            tensors: The tensors, among others.
            keeps_address: Whether he may keep the address.
        """
        if not self._is_on or self._inside:
            return
        self.gave_address = self.gave_address or keeps_address
        self._inside = True
        try:
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    key = tensor.untyped_storage()._cdata
                    self.written.add(key)  # perhaps
                    memory = self._known.get(key)
                    if memory is not None:
                        self._make_room(0, [memory])
                        self._stay([memory])
        finally:
            self._inside = False


class _Looks(TorchFunctionMode):
    """Sees who reaches bytes by no op."""

    def __init__(self, step: DemandPaging) -> None:
        super().__init__()
        self._step = step

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Have the bytes in memory, for good."""
        kwargs, func = kwargs or {}, torchs_own(func)
        if func in _TO_BYTES_OF:
            asking = str(sys._getframe(1).f_globals.get("__name__"))
            keeps = func is Tensor.data_ptr and not asking.startswith("memfit.")
            self._step.is_reached(tree_leaves((args, kwargs)), keeps_address=keeps)
        return func(*args, **kwargs)


def is_managed(tensor: Tensor, owners: int | None = 1) -> bool:
    """Whether the memory of a tensor may be let go and had again.

    Args:
        tensor: The tensor.
        owners: How many tensors may be in it; ``None`` for any number.
    """
    if type(tensor) not in _KINDS or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    place = address(storage)
    if place is None or storage.nbytes() < LEAST_BYTES or not storage.resizable():
        return False
    is_own = _native.is_counted(place) and is_from_allocator(storage)
    return is_own and (owners is None or not has_others(storage, owners))


@cache
def _written(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Which arguments an op writes to, by place and by name."""
    arguments = func._schema.arguments
    written = [
        (place, it.name)
        for place, it in enumerate(arguments)
        if it.alias_info is not None and it.alias_info.is_write
    ]
    return frozenset(place for place, _ in written), frozenset(name for _, name in written)


def _given(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an op is given, and those of them that it writes to."""
    places, names = _written(func)
    given, written = [], []
    pairs = [(number in places, it) for number, it in enumerate(args)]
    pairs += [(name in names, it) for name, it in kwargs.items()]
    for is_written, value in pairs:
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                given.append(leaf)
                if is_written:
                    written.append(leaf)
    return given, written


@cache
def _makes(func: Any) -> bool:
    """Whether what an op returns is new, and not what it was given, or a view of it."""
    returns = func._schema.returns
    return bool(returns) and all(it.alias_info is None for it in returns)


def _made(func: Any, given: list[Tensor], args: tuple[Any, ...]) -> int:
    """Bytes that an op is taken to make before it has run once."""
    if not _makes(func):
        return 0
    sizes = [it.nbytes for it in given]
    if not sizes and args and isinstance(args[0], (list, tuple)):  # as of `zeros`
        whole = [it for it in args[0] if isinstance(it, int)]
        return prod(whole) * _WIDEST
    return sum(sizes) if func._schema.name == "aten::cat" else max(sizes, default=0)


def _is_of_parts(leaf: Any) -> bool:
    """Whether a value is a tensor whose bytes are in others."""
    return isinstance(leaf, Tensor) and leaf.layout is not torch.strided


def _elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many updates an op on lists consists of; 0 of another, and where that is not certain."""
    if not func._schema.name.startswith("aten::_foreach_") or len(func._schema.returns) > 1:
        return 0
    values = [*args, *kwargs.values()]
    if any(isinstance(it, Tensor) and it.dim() for it in values):
        return 0  # numbers of all elements
    counts = {len(it) for it in values if isinstance(it, (list, tuple))}
    return counts.pop() if len(counts) == 1 else 0


def _nth(values: Iterable[Any], number: int) -> tuple[Any, ...]:
    return tuple([it[number]] if isinstance(it, (list, tuple)) else it for it in values)
