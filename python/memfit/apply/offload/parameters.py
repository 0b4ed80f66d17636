"""Parameters elsewhere: they come for the ops that use them, and go again.

Responsible for a plan's ``offload_parameters`` action: noticing which parameters an op is about to
use, having them there, keeping them within their room, and what anybody gets who uses them between
steps. Which come and go is decided by the engine (:class:`memfit._native.Room`). Not responsible
for moving bytes (:mod:`memfit.apply.offload.tiers`). The rules are those of
``docs/concepts/transformed-trace.md``.

The memory of a parameter is let go by making its storage empty, and comes back by making it as
large as it was: every tensor that shares the storage, autograd's saved ones too, sees the bytes
again. Correctness does not depend on the plan: an op that uses a parameter has it, whatever the
order of uses was expected to be.

Invariant: at any moment, whatever failed or was interrupted, the current bytes of each parameter
are in its storage, or in its parcel.

Others may have the memory too: a view that somebody keeps, an array of numpy, another process,
another thread that reads. Such a parameter stays, at the latest from the next step on; until then a
read of it is right, or an error that names it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import _native
from memfit.apply.borrowed import borrowed
from memfit.apply.offload.mapped import is_lent
from memfit.apply.offload.parameter_storage import (
    ParameterStorage,
    are_same,
    parameter_storages,
    refuse_fixed,
)
from memfit.apply.offload.tiers import open_tier
from memfit.apply.optimizer_in_backward import OneByOne, held_parameters
from memfit.apply.part import Part
from memfit.errors import OffloadError, UsageError
from memfit.tensors.as_without_modes import Formulas
from memfit.tensors.barrier import Barrier, owner_of, without_barrier
from memfit.tensors.gradient_sums import GradientSums
from memfit.tensors.operators import only_computes
from memfit.tensors.storage import has_others, viewed
from memfit.torch_versions import offloaded_parameters_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from torch.optim import Optimizer

    from memfit.apply.offload.tiers import Tier


_placed: weakref.WeakSet[ParametersElsewhere] = weakref.WeakSet()
"""Those that may keep a parameter elsewhere: without any, no model has to be looked through."""

BEFORE_RETURN: list[Callable[[int], bool]] = []
"""Told of the bytes of a parameter that is about to be in memory, as somebody uses it between
steps; each returns whether there is still no room for it."""


def is_offloaded(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is that of a parameter that comes and goes.

    Such a parameter gets new memory whenever an op needs it, so its memory may be younger than the
    forward, and any op may free it again to make room. Nothing else may write it to a file.

    Args:
        storage: The storage.
    """
    if not _placed:
        return False  # as a rule, and asked for each op that writes
    everywhere = [it._placed for it in _placed]
    return any(it is not None and storage._cdata in it.by_storage for it in everywhere)


@dataclass(slots=True, frozen=True)
class ParameterDirections:
    """A plan's ``offload_parameters`` action, read and checked.

    Attributes:
        tier: Kind of the place.
        folder: For files.
        room_bytes: Most bytes of parameters in memory.
        ahead_bytes: Most of those that are there before their use.
        names: Those that go, one for each storage.
        order: In which order a step uses them, as places in ``names``.
    """

    tier: str
    folder: str
    room_bytes: int
    ahead_bytes: int
    names: tuple[str, ...]
    order: tuple[int, ...]

    @staticmethod
    def read(action: Mapping[str, Any]) -> ParameterDirections:
        """Read what a plan says.

        Args:
            action: ``OffloadParameters`` of the plan as parsed JSON.

        Raises:
            UsageError: It is no such thing.
        """
        try:
            return ParameterDirections(
                str(action["tier"]),
                str(action.get("folder", "")),
                int(action["room_bytes"]),
                int(action["ahead_bytes"]),
                tuple(str(name) for name in action["names"]),
                tuple(int(place) for place in action["order"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            message = f"what the plan says of `offload_parameters` is malformed: {error!r}"
            raise UsageError(message) from error


@dataclass(slots=True)
class _Place:
    """Where parameters are, and who decides about it."""

    items: list[ParameterStorage]
    room: _native.Room
    by_storage: dict[int, int]
    barrier: Barrier
    by_tensor: dict[int, int] = field(default_factory=dict)
    visitors: dict[int, None] = field(default_factory=dict)
    """Those in memory that torch computed with between steps: behind the barrier still, and unknown
    to the room."""


class ParametersElsewhere(Part):
    """Keeps parameters of a model elsewhere but for a room in memory.

    Attributes:
        tier: Where they go.
    """

    def __init__(
        self,
        model: nn.Module,
        directions: ParameterDirections,
        folder: str | PathLike[str] = "",
    ) -> None:
        """Make the place ready; nothing goes before :meth:`place`.

        Args:
            model: Whose parameters the plan names.
            directions: What the plan says.
            folder: Where to, instead of where the plan says.

        Raises:
            UsageError: This torch cannot, there is no such tier, or memory of a parameter cannot be
                let go.
            OffloadError: The folder cannot be used.
        """
        if (why := offloaded_parameters_refusal()) is not None:
            message = f"the plan offloads parameters: {why}\nhint: plan again with this torch"
            raise UsageError(message)
        window_bytes = max(directions.ahead_bytes, 1)
        self.tier: Tier = open_tier(directions.tier, window_bytes, folder or directions.folder)
        self._held = weakref.ref(model)
        self._directions = directions
        self._placed: _Place | None = None
        self._failure: OffloadError | None = None
        self._is_running = self._is_in_forward = False
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._is_shared = False
        with without_barrier():
            refuse_fixed(model, directions.names)

    # Between steps

    def place(self) -> None:
        """Have parameters where the plan wants them between steps: most of them elsewhere.

        Raises:
            OffloadError: Some could not be written; they stay in memory, whole.
        """
        self._failure = None
        placed = self._place_anew(self._take_over())
        placed.visitors.clear()
        with self._down(placed), self._lock:
            for number, item in enumerate(placed.items):
                self._look_for_others(placed, number)
                if item.is_here:
                    placed.room.admit(number)
            self._carry_out(placed, placed.room.trim())
        if self._failure is not None:
            kept = sum(item.size_bytes for item in placed.items if item.is_here)
            message = (
                f"parameters cannot be offloaded: {self._failure}; "
                f"{_native.bytes_text(kept)} of them stay in memory, unchanged, and no step has "
                "begun"
            )
            raise OffloadError(message) from self._failure

    def bring_home(self) -> None:
        """Have all in memory, as if they had never gone.

        Raises:
            OffloadError: One did not come back as it went.
        """
        self.hand_over(())

    def viewed(self) -> list[str]:
        """Names of those whose memory others see too, by now (:mod:`memfit.tensors.storage`).

        Raises:
            OffloadError: One did not come back as it went.
        """
        placed = self._placed
        if placed is None:
            return []
        for item in placed.items:  # who transfers it has its memory as well
            self._try(item.settle)
            if item.is_coming:
                self._have(item)
        with without_barrier():
            found = {id(parameter) for parameter in viewed(borrowed(self._held).parameters())}
        return [item.name for item in placed.items if id(item.tensors[0]) in found]

    @property
    def away_bytes(self) -> int:
        """Bytes of those that are not in memory now."""
        items = () if self._placed is None else self._placed.items
        return sum(item.size_bytes for item in items if not item.is_here)

    # In a step

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run a step inside this: every op finds the parameters that it uses."""
        placed = self._placed
        if self._is_running or placed is None:  # all are in memory
            yield
            return
        with self._down(placed), UseWatch(partial(self._use, placed)):
            yield

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Run the user's own code of a forward inside this: ops find the parameters they use.

        What Python is given the memory of stays until the next step, as between steps.
        """
        placed = self._placed
        if placed is None:  # all are in memory
            yield
            return
        self._is_in_forward = True
        try:
            with UseWatch(partial(self._use, placed)):
                yield
        finally:
            self._is_in_forward = False

    @contextlib.contextmanager
    def update_of(self, parameter: Tensor) -> Iterator[None]:
        """Run the update of one parameter inside this; it is written as soon as it is over."""
        placed = self._placed
        number = placed.by_tensor.get(id(parameter)) if placed is not None else None
        if placed is None or number is None:
            yield
            return
        with placed.barrier.opened(parameter):  # some optimizers choose kernels by its class
            yield
        item = placed.items[number]
        with self._lock:
            if item.is_here and not item.is_coming:
                # Not every optimizer lets torch know what it changes.
                self._before_write(item)
                if not item.is_held:
                    self._try(lambda: item.send(self.tier))

    def update_all(self, optimizer: Optimizer) -> OneByOne:
        """All updates of one step of an optimizer, which is still to be finished.

        Args:
            optimizer: Its state is in memory.

        Raises:
            OffloadError: A parameter did not come back as it went.
        """
        one_by_one = OneByOne(optimizer)
        for parameter in self._ordered(held_parameters(optimizer)):
            if parameter.grad is not None:
                with self.update_of(parameter):
                    one_by_one.update(parameter)
        return one_by_one

    def _ordered(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Parameters in the order of their updates: as the plan uses them last."""
        placed = self._placed
        last = {place: turn for turn, place in enumerate(self._directions.order)}

        def turn(parameter: Tensor) -> int:
            number = placed.by_tensor.get(id(parameter), -1) if placed is not None else -1
            return last.get(number, -1)

        return sorted(parameters, key=turn)

    # How

    def _use(self, placed: _Place, storages: list[int], *, is_written: bool) -> None:
        """An op is about to use what is in some storages."""
        numbers = [placed.by_storage[s] for s in storages if s in placed.by_storage]
        if not numbers or self._placed is not placed:
            return
        with self._lock:
            self._carry_out(placed, placed.room.need(numbers))
            for number in numbers:
                self._have(placed.items[number])
                if is_written:
                    self._before_write(placed.items[number])

    def _look_for_others(self, placed: _Place, number: int) -> None:
        """Have and hold a parameter whose memory others may see."""
        item = placed.items[number]
        before = item.storage._cdata
        item.is_held = item.stays()
        if item.storage._cdata != before:
            del placed.by_storage[before]
            placed.by_storage[item.storage._cdata] = number
        if item.is_held:
            self._have(item)
            self._before_write(item)  # others may, and nobody tells of it

    def _carry_out(self, placed: _Place, moves: Sequence[tuple[str, int]]) -> None:
        for kind, number in moves:
            item = placed.items[number]
            if kind == "evict":
                self._evict(placed, number)
            elif kind == "ahead":
                if not item.is_here:
                    item.begin()
            else:
                self._have(item)

    def _evict(self, placed: _Place, number: int) -> None:
        item = placed.items[number]
        if item.is_coming:
            with contextlib.suppress(OffloadError):  # said when somebody needs it
                item.arrive()
        if not item.is_here:
            return
        stays = item.is_held or item.readers > 0 or not item.storage.resizable()
        if stays or not self._try(lambda: self._save(item)):
            placed.room.admit(number)
            return
        item.let_go()

    def _save(self, item: ParameterStorage) -> None:
        if item.is_changed:
            if self._failure is not None:
                raise self._failure  # once is enough in a step
            item.send(self.tier)
        item.settle()

    def _try(self, write: Callable[[], None]) -> bool:
        """Write; a write that fails costs memory, and the next step does not begin."""
        try:
            write()
        except OffloadError as error:
            self._failure = error
            return False
        return True

    def _before_write(self, item: ParameterStorage) -> None:
        self._try(item.settle)
        item.is_outgoing = False
        item.is_changed = True

    def _have(self, item: ParameterStorage) -> None:
        """Have a parameter in memory, whole."""
        try:
            if not item.is_here:
                item.begin()
        except OffloadError as error:
            message = f"the parameter `{item.name}` cannot be fetched: {error}"
            raise OffloadError(message) from error
        try:
            item.arrive()
        except OffloadError as error:
            message = f"the parameter `{item.name}` is lost: {error}\nhint: go on from a checkpoint"
            raise OffloadError(message) from error

    @contextlib.contextmanager
    def _on_use(self, tensors: list[Tensor], function: Callable[..., Any]) -> Iterator[None]:
        """Somebody uses parameters between calls or steps, or another thread does in one.

        They are in memory from then on, until the next step. What torch alone has computed with may
        go before, if there is no room for others beside it: it is a *visitor*.
        """
        is_other = threading.get_ident() != self._thread
        if self._is_in_forward and not is_other and only_computes(function):
            yield  # its ops are watched
            return
        # Transforms of `torch.func` take what is made inside them for their own.
        with self._lock, without_barrier(), torch._C._DisableFuncTorch():
            placed, numbers = self._placed, []
            if placed is not None:
                numbers = [placed.by_tensor[id(tensor)] for tensor in tensors]
                self._is_shared |= is_other
                self._come(placed, numbers, function, is_other=is_other)
        try:
            yield
        finally:
            with self._lock:
                for number in numbers:
                    assert placed is not None, "without a place there are no numbers"
                    item = placed.items[number]
                    item.readers -= is_other
                    # What it returned may be a view, which can be used unnoticed.
                    if number in placed.visitors and has_others(item.storage, len(item.tensors)):
                        self._let_through(placed, number)

    def _come(
        self, placed: _Place, numbers: list[int], function: Callable[..., Any], *, is_other: bool
    ) -> None:
        """Have parameters in memory that a function is about to use."""
        may_visit = only_computes(function) and not (self._is_shared or self._is_in_forward)
        for number in numbers:
            item = placed.items[number]
            is_visitor = may_visit and (number in placed.visitors or not item.is_here)
            asked = () if is_other or item.is_here else BEFORE_RETURN
            if any([it(item.size_bytes) for it in asked]):  # noqa: C419 - each is to be told
                self._let_visitors_go(placed, numbers)
            self._have(item)
            self._before_write(item)
            item.is_held |= is_other or self._is_in_forward
            item.readers += is_other
            if is_visitor and not any(map(placed.barrier.cannot_be_passed, item.tensors)):
                placed.visitors[number] = None
            else:
                self._let_through(placed, number)

    def _let_through(self, placed: _Place, number: int) -> None:
        """Have a parameter used unnoticed until the next step."""
        placed.visitors.pop(number, None)
        for tensor in placed.items[number].tensors:
            # While other threads are about, they are to be noticed every time.
            if not self._is_shared or placed.barrier.cannot_be_passed(tensor):
                placed.barrier.let_through(tensor)

    def _let_visitors_go(self, placed: _Place, used: Collection[int]) -> None:
        """Let go of the parameters that torch has only computed with, and nothing else refers to.

        Args:
            placed: Where they are.
            used: Those that are used now.
        """
        for number in [it for it in placed.visitors if it not in used]:
            item = placed.items[number]
            self._look_for_others(placed, number)
            is_free = not (item.is_held or any(map(_is_saved, item.tensors)))
            if is_free and item.storage.resizable() and self._try(partial(self._save, item)):
                item.let_go()
                del placed.visitors[number]

    @contextlib.contextmanager
    def _down(self, placed: _Place) -> Iterator[None]:
        """This thread passes the barrier inside this; for the others, and after it, it is up."""
        if self._is_running:
            yield
            return
        self._thread = threading.get_ident()
        placed.barrier.put_up()
        for item in placed.items:
            for tensor in item.tensors:
                if placed.barrier.cannot_be_passed(tensor):
                    placed.barrier.let_through(tensor)
        self._is_running = True
        try:
            with placed.barrier.passing():
                yield
        finally:
            self._is_running = False
            if self._placed is placed:  # else somebody else has them by now
                placed.barrier.put_up()

    def _take_over(self) -> list[ParameterStorage]:
        """Take over what another plan for the same model keeps elsewhere."""
        with without_barrier():
            mine = {
                item.storage._cdata
                for item in parameter_storages(borrowed(self._held), self._directions.names)
            }
        taken: list[ParameterStorage] = []
        for parameter in borrowed(self._held).parameters():
            owner = owner_of(parameter)
            if isinstance(owner, ParametersElsewhere) and owner is not self:
                taken += owner.hand_over(mine)
        return taken

    def hand_over(self, storages: Collection[int]) -> list[ParameterStorage]:
        """Leave some storages to another, as they are, and have the others in memory.

        Raises:
            OffloadError: One of those did not come back as it went.
        """
        placed = self._placed
        if placed is None:
            return []
        kept = [item for item in placed.items if item.storage._cdata in storages]
        with self._down(placed), self._lock:
            for item in placed.items:
                if item.storage._cdata not in storages:
                    self._have(item)
                    with contextlib.suppress(OffloadError):
                        item.settle()  # it is in memory, whole, and stays
        placed.barrier.take_down()
        self._placed = None
        _placed.discard(self)
        return kept

    def _place_anew(self, taken: Sequence[ParameterStorage]) -> _Place:
        """The place as it is, or a new one where the model has other parameters by now."""
        with without_barrier():
            found = parameter_storages(borrowed(self._held), self._directions.names)
        placed = self._placed
        if placed is not None and are_same(placed.items, found):
            return placed
        self.bring_home()
        directions = self._directions
        with without_barrier():
            found = parameter_storages(borrowed(self._held), directions.names)
        known = {item.storage._cdata: item for item in taken}
        found = [known.get(item.storage._cdata, item) for item in found]
        _placed.add(self)
        self._placed = _Place(
            found,
            _native.Room(
                [item.size_bytes for item in found],
                list(directions.order),
                directions.room_bytes,
                directions.ahead_bytes,
            ),
            {item.storage._cdata: number for number, item in enumerate(found)},
            Barrier([tensor for item in found for tensor in item.tensors], self, self._on_use),
            {id(t): number for number, item in enumerate(found) for t in item.tensors},
        )
        return self._placed


def _is_saved(parameter: Tensor) -> bool:
    """Whether a graph has saved a parameter: its backward would read it, which no barrier notices.

    Of what requires gradients, the node that accumulates them has it as well, while any graph leads
    there, such as that of a loss whose backward has run.
    """
    return is_lent(parameter, owners=2 if parameter.requires_grad else 1)


def bring_parameters_home(model: nn.Module) -> None:
    """Have all parameters of a model in memory that some plan keeps elsewhere.

    Raises:
        OffloadError: One did not come back as it went.
    """
    if not _placed:
        return
    for parameter in model.parameters():
        owner = owner_of(parameter)
        if isinstance(owner, ParametersElsewhere):
            owner.bring_home()


def parameters_elsewhere() -> int:
    """Bytes of all parameters that are not in memory now."""
    return sum(it.away_bytes for it in _placed)


class UseWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of the storages that ops are about to use."""

    def __init__(self, on_use: Callable[..., None]) -> None:
        """Create it.

        Args:
            on_use: Called with the identities of an op's storages, and ``is_written``.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_use = on_use
        self._formulas = Formulas(GradientSums())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for dynamo: nothing comes between torch's engine and what it calls."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Tell, and run the op."""
        storages: list[int] = []
        _collect(args, storages)
        if kwargs:
            _collect(kwargs.values(), storages)
        if storages:
            self._on_use(storages, is_written=_is_mutable(func))
        return self._formulas.run(func, args, kwargs or {})


def _collect(values: Iterable[Any], storages: list[int]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                storages.append(value.untyped_storage()._cdata)
        elif isinstance(value, (list, tuple)):
            _collect(value, storages)


def _is_mutable(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)
