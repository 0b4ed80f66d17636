"""The optimizer's state of one parameter, of which some tensors are elsewhere.

Responsible for :class:`AwayState`, which takes the place of the plain dictionary in
``optimizer.state``: what sends tensors out and has them back, and what anybody sees who looks at
the state meanwhile. Not responsible for when they go and come
(:mod:`memfit.apply.offload.optimizer_state`).

Whoever reads a tensor that is elsewhere gets it, at home from then on, so that writing to it
counts. A tensor that somebody else holds as well, such as a checkpoint that was loaded into the
optimizer and is still in a variable, does not go from there: its memory becomes a mapped file until
its update. Copying, pickling and ``state_dict()`` give plain dictionaries with copies; the state
stays where it is.

Invariant: at any moment, whatever failed or was interrupted, each tensor's current bytes are either
in the dictionary or in its parcel. Threads take turns.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit._native import bytes_text
from memfit.apply.offload.mapped import is_alone, is_lent, may_go, to_file, to_memory
from memfit.apply.offload.pinned import bytes_of
from memfit.errors import OffloadError
from memfit.tensors.barrier import without_barrier
from memfit.tensors.optimizers import PartlyOffloaded, in_memory
from memfit.tensors.storage import has_others, plain_tensors

if TYPE_CHECKING:
    from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView

    from torch.optim import Optimizer

    from memfit.apply.offload.tiers import Parcel, Tier


@dataclass(slots=True)
class Stored:
    """A tensor of the state that is elsewhere, or on its way.

    Attributes:
        size: Its sizes.
        stride: Its strides, dense.
        dtype: Its type.
        device: Its device.
        parcel: Its bytes.
        coming: Where they are being fetched ahead to.
        is_begun: Whether that has begun, as far as is known after an interrupt.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parcel: Parcel
    coming: Tensor | None = None
    is_begun: bool = False

    @staticmethod
    def of(tensor: Tensor, tier: Tier) -> Stored:
        """Begin to send a tensor.

        Raises:
            OffloadError: No more can be sent.
        """
        return Stored(
            tensor.size(), tensor.stride(), tensor.dtype, tensor.device, tier.send(tensor)
        )

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return self.size.numel() * self.dtype.itemsize

    def room(self) -> Tensor:
        """Memory for it, which updates write later, even if inference mode is on now."""
        with torch.inference_mode(mode=False):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def fetch_ahead(self) -> None:
        """Begin to fetch it.

        Raises:
            OffloadError: It was not written.
        """
        if self.coming is None:
            self.is_begun = False
            self.coming = self.room()
        if not self.is_begun:
            self.parcel.prefetch(bytes_of(self.coming))
            self.is_begun = True

    def fetch(self) -> Tensor:
        """It, whole; its bytes elsewhere stay.

        Raises:
            OffloadError: The bytes did not come back as they went.
        """
        target = self.coming
        if target is None:
            target = self.room()
            self.parcel.fetch(bytes_of(target))
            return target
        try:
            self.fetch_ahead()
            self.parcel.wait()
        except Exception:
            self.coming = None  # its error is told once; an interrupted wait can go on
            raise
        self.coming = None
        return target


_OWN_REFERENCES = 2
"""References to a value that only its dictionary has, as seen by who asks for their number."""


class AwayState(dict[str, Any], PartlyOffloaded):
    """State of one parameter; reads as the plain dictionary it stands for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Take over values, all of them at home.

        Args:
            values: The state.
        """
        super().__init__(values)
        self._away: dict[str, Stored] = {}
        self._outgoing: dict[str, Stored] = {}
        self._mapped: set[str] = set()
        self._lock = threading.RLock()

    # Going out and coming back

    @property
    def away_bytes(self) -> int:
        """Bytes that are not at home; those being fetched ahead count."""
        return sum(stored.size_bytes for stored in self._away.values())

    @property
    def is_coming(self) -> bool:
        """Whether any of it is being fetched ahead."""
        return any(stored.coming is not None for stored in self._away.values())

    def home_bytes(self, tier: Tier, least_bytes: int) -> int:
        """Bytes at home that could go.

        Args:
            tier: Where to.
            least_bytes: Smallest tensor that goes.
        """
        # One after the other: a list of those that move would hold them, as others do.
        moved = sum(tensor.nbytes for _, tensor in self._movable(tier, least_bytes))
        return moved + sum(tensor.nbytes for _, tensor in self._mappable(tier, least_bytes))

    def send(self, tier: Tier, least_bytes: int) -> None:
        """Begin to send out what can go; it stays until :meth:`settle`.

        What others hold has another memory at once, where there is no other thread.

        Args:
            tier: Where to.
            least_bytes: Smallest tensor that goes.

        Raises:
            OffloadError: No more can be sent. Everything is at home.
        """
        with self._lock:
            try:
                for key, tensor in self._movable(tier, least_bytes):
                    self._outgoing[key] = self._stored(tensor, tier)
                for key, tensor in self._mappable(tier, least_bytes):
                    _map(tensor, tier)
                    self._mapped.add(key)
            except BaseException:
                self.keep()
                raise

    def settle(self) -> None:
        """Wait until what goes out is written, and let go of it, unless somebody keeps it.

        Raises:
            OffloadError: Something could not be written. That, at least, is at home.
        """
        with self._lock:
            try:
                for stored in self._outgoing.values():
                    stored.parcel.settle()
            except Exception:
                self.keep()
                raise
            for key in list(self._outgoing):
                if not self._is_kept(key):
                    # First: an interrupt may come between any two of these.
                    self._away[key] = self._outgoing[key]
                    super().__setitem__(key, None)
                del self._outgoing[key]

    def keep(self) -> None:
        """Let nothing go out that has not settled."""
        self._outgoing.clear()

    def fetch_ahead(self) -> None:
        """Begin to fetch what is elsewhere.

        Raises:
            OffloadError: Some of it was not written.
        """
        with self._lock:
            for stored in self._away.values():
                stored.fetch_ahead()

    def retract(self) -> None:
        """Let go again of what was fetched ahead and not used.

        Raises:
            OffloadError: It did not come back as it went; it is still elsewhere.
        """
        with self._lock:
            for stored in self._away.values():
                if stored.coming is not None:
                    stored.fetch()

    def bring_home(self) -> None:
        """Have everything at home.

        Raises:
            OffloadError: Some of it did not come back as it went. That is still elsewhere.
        """
        with self._lock:
            for key in [*self._away, *self._mapped]:
                self._bring(key)

    def in_memory(self) -> dict[str, Any]:
        """What is at home, or on its way there."""
        there = {key: value for key, value in super().items() if key not in self._away}
        coming = {key: stored.coming for key, stored in self._away.items()}
        return there | {key: tensor for key, tensor in coming.items() if tensor is not None}

    def with_room(self) -> dict[str, Any]:
        """What is at home, and room for the rest, whose contents are not there."""
        with self._lock:
            there = dict(super().items())
            return there | {key: stored.room() for key, stored in self._away.items()}

    def plain(self) -> dict[str, Any]:
        """A plain dictionary: what is at home as it is, of the rest copies.

        Raises:
            OffloadError: Some of it did not come back as it went.
        """
        with self._lock:
            there = dict(super().items())
            return {
                key: self._away[key].fetch() if key in self._away else value
                for key, value in there.items()
            }

    def _bring(self, key: str) -> None:
        with self._lock:
            self._outgoing.pop(key, None)  # who reads it may write to it
            stored = self._away.get(key)
            if stored is not None:
                super().__setitem__(key, stored.fetch())
                del self._away[key]
            if key in self._mapped:
                self._mapped.discard(key)
                value = super().__getitem__(key)
                # Where somebody sees its memory, it is written in the mapping, which is private.
                if may_go(value, is_mapped=True) and not is_lent(value) and is_alone():
                    to_memory(value)

    def _stored(self, tensor: Tensor, tier: Tier) -> Stored:
        """Begin to send a tensor."""
        return Stored.of(tensor, tier)

    def _movable(self, tier: Tier, least_bytes: int) -> list[tuple[str, Tensor]]:
        with self._lock:
            going = [key for key in self if key not in self._away and not self._is_kept(key)]
            found = [(key, super(AwayState, self).__getitem__(key)) for key in going]
        return [(key, value) for key, value in found if _is_movable(value, tier, least_bytes)]

    def _mappable(self, tier: Tier, least_bytes: int) -> list[tuple[str, Tensor]]:
        """Tensors at home that others hold, and nobody sees but by the tensor itself."""
        if not tier.folder or not is_alone():
            return []
        with self._lock:
            here = [key for key in self if key not in self._away and key not in self._outgoing]
            found = [
                (key, super(AwayState, self).__getitem__(key)) for key in here if self._is_kept(key)
            ]
        return [
            (key, value)
            for key, value in found
            if _is_movable(value, tier, least_bytes) and may_go(value) and not is_lent(value)
        ]

    def _is_kept(self, key: str) -> bool:
        """Whether somebody else has a tensor, or sees its memory."""
        own = super().__getitem__
        if sys.getrefcount(own(key)) > _OWN_REFERENCES:
            return True
        if not isinstance(own(key), Tensor) or own(key).layout is not torch.strided:
            return False
        storage = own(key).untyped_storage()
        return is_lent(own(key)) or has_others(storage, 1, 1 + (key in self._outgoing))

    # What a dictionary does

    def __getitem__(self, key: str) -> Any:
        """The value of a key, at home from now on."""
        with self._lock:
            self._bring(key)
            return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key."""
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """All values, at home from now on; those that were there when this was asked."""
        return self._all().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """All items, at home from now on; those that were there when this was asked."""
        return self._all().items()

    def _all(self) -> dict[str, Any]:
        with self._lock:
            for key in self:
                self._bring(key)
            return dict(super().items())

    def __iter__(self) -> Iterator[str]:
        """All keys."""
        # Not inherited: copying a dictionary from C would see that and look past the above.
        return super().__iter__()

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a value; what was elsewhere is forgotten."""
        with self._lock:
            self._forget(key)
            super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        """Forget a value."""
        with self._lock:
            self._forget(key)
            super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """Take a value out."""
        with self._lock:
            self._bring(key)
            self._forget(key)
            return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """Take the last item out."""
        if not self:
            raise KeyError("popitem(): dictionary is empty")
        key = list(self)[-1]
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is set where there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **more: Any) -> None:
        """Set values."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._away.clear()
        self._outgoing.clear()
        self._mapped.clear()

    def copy(self) -> dict[str, Any]:
        """A plain dictionary."""
        return self.plain()

    def __or__(self, other: Any) -> Any:
        """A plain dictionary, updated."""
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        """Another, updated by a plain dictionary."""
        return other | self.plain()

    def __ior__(self, other: Any) -> Any:
        """Update it."""
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        """Compare as a plain dictionary does."""
        return self.plain() == other

    def __ne__(self, other: object) -> bool:
        """Compare as a plain dictionary does."""
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """As a dictionary; what is elsewhere is not fetched for it."""
        shown = (
            f"{key!r}: {'<offloaded>' if key in self._away else repr(value)}"
            for key, value in super().items()
        )
        return f"{{{', '.join(shown)}}}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain."""
        return dict, (self.plain(),)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are plain."""
        return self.__reduce__()

    def _forget(self, key: str) -> None:
        self._away.pop(key, None)
        self._outgoing.pop(key, None)
        self._mapped.discard(key)


def away_state(optimizer: Optimizer, parameter: Tensor) -> AwayState | None:
    """The state of a parameter as one that may go; ``None`` where it has none.

    Args:
        optimizer: The optimizer; its plain dictionary is replaced.
        parameter: The parameter.
    """
    state = optimizer.state.get(parameter)
    if not state:
        return None
    if not isinstance(state, AwayState):
        state = optimizer.state[parameter] = AwayState(state)
    return state


def bring_home(optimizer: Optimizer, stays: tuple[type[AwayState], ...] = ()) -> None:
    """Have all state at home, in plain dictionaries.

    Args:
        optimizer: The optimizer.
        stays: The kinds of state that stay where they are, and as they are.

    Raises:
        OffloadError: Some of it did not come back as it went. That is still elsewhere.
    """
    for parameter, state in list(optimizer.state.items()):
        if isinstance(state, AwayState) and type(state) not in stays:
            state.bring_home()
            if state:
                optimizer.state[parameter] = dict(state)
            else:  # it waited for a first update
                del optimizer.state[parameter]
    if stays:
        return
    hooks = optimizer._optimizer_state_dict_post_hooks
    for number, hook in list(hooks.items()):
        if hook is _plain_state_dict:
            del hooks[number]


def away_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state that are offloaded, which ``state_dict()`` copies to memory.

    Args:
        optimizer: The optimizer.
    """
    states = optimizer.state.values()
    return sum(state.away_bytes for state in states if isinstance(state, AwayState))


def whole_state_bytes(states: Iterable[Any]) -> int:
    """Bytes of an optimizer's state, wherever it is.

    Args:
        states: The state of each parameter.
    """
    states = list(states)
    with without_barrier():
        here = tree_leaves([dict(in_memory(state)) for state in states])
        held = [it for it in here if isinstance(it, Tensor)]
        parts = chain.from_iterable(map(plain_tensors, held))
        sizes = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    away = (state.away_bytes for state in states if isinstance(state, AwayState))
    return sum(sizes.values()) + sum(away)


def save_plainly(optimizer: Optimizer) -> None:
    """Have ``state_dict()`` give plain dictionaries until everything is brought home.

    Args:
        optimizer: The optimizer.
    """
    if _plain_state_dict not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_plain_state_dict, prepend=True)


def _plain_state_dict(_optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    held = state_dict.get("state", {})
    for key, state in list(held.items()):
        if isinstance(state, AwayState):
            held[key] = state.plain()
            if not state:  # before its first update a parameter has none
                del held[key]


def _map(tensor: Tensor, tier: Tier) -> None:
    """Have a tensor in a mapped file.

    Raises:
        OffloadError: It cannot be written, or not be mapped.
    """
    try:
        to_file(tensor, tier.folder)
    except (OSError, RuntimeError) as error:
        message = f"{bytes_text(tensor.nbytes)} cannot be mapped from a file: {error}"
        raise OffloadError(message) from error


def _is_movable(value: Any, tier: Tier, least_bytes: int) -> bool:
    """Whether a value is a plain tensor, alone and dense in its storage, that the tier takes."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
        return False
    size = value.nbytes
    if size < max(least_bytes, 1) or value.untyped_storage().nbytes() != size:
        return False
    reach = sum((n - 1) * s for n, s in zip(value.size(), value.stride(), strict=True))
    return reach + 1 == value.numel() and tier.refusal(value.device) is None
