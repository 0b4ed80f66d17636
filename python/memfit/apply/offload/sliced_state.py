"""The optimizer's state of one large parameter, elsewhere slice by slice.

Responsible for :class:`SlicedState`, whose tensors are stored in as many pieces as the update of
the parameter has slices, and for that update: the state of one slice comes, is updated and goes
before the next one comes. So a step holds the state of a slice, and never that of the parameter.
Not responsible for which parameters are updated so
(:mod:`memfit.apply.offload.optimizer_state`) nor for why slices give the same bits
(:mod:`memfit.tensors.sliced_update`).

A piece that cannot be written stays in memory, and goes with the next update or before the next
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.apply.offload.pinned import bytes_of
from memfit.apply.offload.state_view import AwayState, Stored
from memfit.errors import OffloadError
from memfit.tensors.sliced_update import bounds, flat, is_alike, state_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim import Optimizer

    from memfit.apply.offload.tiers import Parcel, Tier


class _Here:
    """A piece that could not be written."""

    __slots__ = ("piece",)

    def __init__(self, piece: Tensor) -> None:
        self.piece = piece

    def settle(self) -> None:
        pass

    def fetch(self, target: Tensor) -> None:
        target.copy_(bytes_of(self.piece))

    def prefetch(self, target: Tensor) -> None:
        self.fetch(target)

    def wait(self) -> None:
        pass


class _Pieces:
    """The bytes of a tensor of the state, a parcel for each slice; as one they are a parcel."""

    __slots__ = ("ends", "parcels")

    def __init__(self) -> None:
        """There are none yet."""
        self.parcels: list[Parcel] = []
        self.ends: list[int] = []

    def add(self, parcel: Parcel, size_bytes: int) -> None:
        """Know the next piece."""
        self.ends.append(size_bytes + (self.ends[-1] if self.ends else 0))
        self.parcels.append(parcel)

    def settle(self) -> None:
        for parcel in self.parcels:
            parcel.settle()

    def fetch(self, target: Tensor) -> None:
        for parcel, part in self._parts(target):
            parcel.fetch(part)

    def prefetch(self, target: Tensor) -> None:
        for parcel, part in self._parts(target):
            parcel.prefetch(part)

    def wait(self) -> None:
        for parcel in self.parcels:
            parcel.wait()

    def _parts(self, target: Tensor) -> Iterator[tuple[Parcel, Tensor]]:
        start = 0
        for parcel, end in zip(self.parcels, self.ends, strict=True):
            yield parcel, target[start:end]
            start = end


class SlicedState(AwayState):
    """State of one parameter, whose tensors go and come slice by slice.

    Empty, it waits for the first update.

    Attributes:
        count: In how many slices it is updated.
    """

    def __init__(
        self, values: Mapping[str, Any], parameter: Tensor, count: int, tier: Tier
    ) -> None:
        """Take over values, all of them at home.

        Args:
            values: The state.
            parameter: Whose it is.
            count: In how many slices it is updated.
            tier: Where pieces go.
        """
        super().__init__(values)
        self._size, self._stride = parameter.size(), parameter.stride()
        self._dtype, self._tier = parameter.dtype, tier
        self.count = count

    def goes_in_slices(self) -> bool:
        """Whether all of it that is large is elsewhere, in pieces, and none on its way."""
        own = {key: dict.__getitem__(self, key) for key in self}
        return (
            not self._outgoing
            and not self.is_coming
            and all(self._is_in_pieces(stored) for stored in self._away.values())
            and not any(
                isinstance(value, Tensor) and value.dim() > 0 and value.size() == self._size
                for value in own.values()
            )
        )

    def home_bytes(self, tier: Tier, least_bytes: int) -> int:
        """Bytes at home that could go, pieces included that could not.

        Args:
            tier: Where to.
            least_bytes: Smallest tensor that goes.
        """
        here = sum(here.piece.nbytes for _, _, here in self._left_here())
        return here + super().home_bytes(tier, least_bytes)

    def send(self, tier: Tier, least_bytes: int) -> None:
        """Send out what can go, and what could not go before.

        Args:
            tier: Where to.
            least_bytes: Smallest tensor that goes.

        Raises:
            OffloadError: No more can be sent.
        """
        with self._lock:
            for parcels, number, here in self._left_here():
                parcels[number] = self._sent(here.piece)
        super().send(tier, least_bytes)

    def update_slices(
        self, optimizer: Optimizer, parameter: Tensor, step: Callable[[list[Tensor]], None]
    ) -> None:
        """Update a parameter by its gradient, slice by slice.

        Args:
            optimizer: Its optimizer.
            parameter: The parameter, with its gradient.
            step: Runs the optimizer's step over a list of parameters.

        Raises:
            OffloadError: A piece did not come back as it went.
        """
        assert parameter.grad is not None, "it has slices"
        with self._lock:
            is_first = not len(self)
            try:
                for number, (start, stop) in enumerate(bounds(parameter.numel(), self.count)):
                    part = flat(parameter, start, stop)
                    part.grad = flat(parameter.grad, start, stop)
                    before = None if is_first else {key: self._slice(key, number) for key in self}
                    self._update_slice(optimizer, part, number, before, step)
            except BaseException:
                if is_first:
                    self.clear()  # as an update that failed leaves none
                raise

    def _update_slice(
        self,
        optimizer: Optimizer,
        part: Tensor,
        number: int,
        before: dict[str, Any] | None,
        step: Callable[[list[Tensor]], None],
    ) -> None:
        """Update one slice, and have its state go."""
        if before is not None:
            optimizer.state[part] = before
        try:
            step([part])
        finally:
            made = optimizer.state.pop(part, {})
        is_last = number + 1 == self.count
        for key in list(made):
            value = made.pop(key)
            if is_alike(value, part):
                self._take(key, number, value)
            elif is_last or key not in self:
                self._take_over(key, value)  # a count of steps, the same in all slices
            del value  # before the next one comes

    def _left_here(self) -> list[tuple[list[Parcel], int, _Here]]:
        """Pieces that could not be written, each with where it is listed."""
        pieces = [it.parcel for it in self._away.values() if isinstance(it.parcel, _Pieces)]
        listed = [(of.parcels, *place) for of in pieces for place in enumerate(of.parcels)]
        return [(of, place, here) for of, place, here in listed if isinstance(here, _Here)]

    def _slice(self, key: str, number: int) -> Any:
        """What a slice's update reads under a key."""
        stored = self._away.get(key)
        if stored is None:
            value = dict.__getitem__(self, key)
            return value.clone() if isinstance(value, Tensor) else value
        assert isinstance(stored.parcel, _Pieces), "looked at before"
        start = stored.parcel.ends[number - 1] if number else 0
        size = stored.parcel.ends[number] - start
        piece = torch.empty(size // stored.dtype.itemsize, dtype=stored.dtype)
        stored.parcel.parcels[number].fetch(bytes_of(piece))
        return piece

    def _take(self, key: str, number: int, piece: Tensor) -> None:
        """A slice was updated: its piece goes."""
        stored = self._away.get(key)
        if stored is None:
            where = (self._size, self._stride, piece.dtype, piece.device)
            stored = self._away[key] = Stored(*where, _Pieces())
            dict.__setitem__(self, key, None)
        pieces = stored.parcel
        assert isinstance(pieces, _Pieces), "looked at before"
        parcel: Parcel
        try:
            parcel = self._sent(piece)
        except OffloadError:
            parcel = _Here(piece)  # said when it is sent again
        if number < len(pieces.parcels):
            pieces.parcels[number] = parcel
        else:
            pieces.add(parcel, piece.nbytes)

    def _take_over(self, key: str, value: Any) -> None:
        """Know what is the same in all slices; a tensor stays the same object."""
        before = dict.get(self, key)
        if isinstance(before, Tensor) and isinstance(value, Tensor):
            before.copy_(value)
        else:
            dict.__setitem__(self, key, value)

    def _sent(self, piece: Tensor) -> Parcel:
        """A piece, written.

        Raises:
            OffloadError: It could not be.
        """
        if piece.untyped_storage().nbytes() != piece.nbytes:
            piece = piece.clone()
        parcel = self._tier.send(piece)
        parcel.settle()
        return parcel

    def _stored(self, tensor: Tensor, tier: Tier) -> Stored:
        where = (tensor.size(), tensor.stride(), tensor.dtype)
        if where != (self._size, self._stride, self._dtype):
            return super()._stored(tensor, tier)
        pieces = _Pieces()
        for start, stop in bounds(tensor.numel(), self.count):
            piece = flat(tensor, start, stop).clone()
            pieces.add(self._sent(piece), piece.nbytes)
        return Stored(*where, tensor.device, pieces)

    def _is_in_pieces(self, stored: Stored) -> bool:
        there = (stored.size, stored.stride, stored.dtype)
        return isinstance(stored.parcel, _Pieces) and there == (
            self._size,
            self._stride,
            self._dtype,
        )


def updated_in_slices(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    step: Callable[[list[Tensor]], None],
) -> bool:
    """Update a parameter by its gradient, if its state is elsewhere slice by slice.

    Args:
        optimizer: Its optimizer.
        group: The group that lists it.
        parameter: The parameter, with its gradient.
        step: Runs the optimizer's step over a list of parameters.

    Returns:
        Whether that was done; otherwise its state is in memory.

    Raises:
        OffloadError: A piece did not come back as it went.
    """
    state = optimizer.state.get(parameter)
    if not isinstance(state, SlicedState) or not may_update_in_slices(
        optimizer, group, parameter, state
    ):
        return False
    state.update_slices(optimizer, parameter, step)
    return True


def may_update_in_slices(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, state: SlicedState
) -> bool:
    """Whether a parameter can be updated with its state elsewhere.

    Args:
        optimizer: Its optimizer.
        group: The group that lists it.
        parameter: The parameter, with its gradient.
        state: Its state.
    """
    count = state_slices(optimizer, group, parameter)
    return parameter.grad is not None and count == state.count and state.goes_in_slices()
