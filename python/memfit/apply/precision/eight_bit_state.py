"""The optimizer's state of one parameter in 8 bits.

Responsible for :class:`EightBitState`, which stands for the plain dictionary in
``optimizer.state``. Not responsible for the update that reads and writes it
(:mod:`memfit.apply.precision.eight_bit_updates`), nor for which parameters have one
(:mod:`memfit.apply.precision.optimizer_bits`).

Whoever reads a moment gets it in 32 bits, and from then on it is so: writing to it counts. It is
shrunk again before the next step, unless somebody keeps it; until then torch's own update is used.

Moments may be offloaded, and lower halves with them: an update then has one slice of them after the
other in memory (:mod:`memfit.apply.offload.byte_slices`).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD

from memfit import _native
from memfit.apply.offload.byte_slices import ByteSlices, slices_of
from memfit.apply.offload.state_view import AwayState, Stored
from memfit.apply.precision import moments_by_ops as by_ops
from memfit.apply.precision.narrow import BLOCK, Here, memory_of
from memfit.tensors.moments import lies_densely, moments_of
from memfit.tensors.narrow_parameters import belongs, is_narrow, lower_half

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.optim import Optimizer

    from memfit.apply.offload.tiers import Tier


class _Moment(Here):
    """A moment in 8 bits, in memory: one slice."""

    __slots__ = ("held", "is_square")

    def __init__(self, like: Tensor, *, is_square: bool) -> None:
        """One that is zero.

        Args:
            like: What it has as many numbers as, where that is.
            is_square: Whether it is a mean of squares.
        """
        size = _bytes_of_moment(like.numel())
        self.held = torch.zeros(size, dtype=torch.uint8, device=like.device)
        self.is_square = is_square

    def take(self, wide: Tensor) -> None:
        """Write numbers of 32 bits, which lie densely."""
        _shrink(in_order(wide), self.held, is_square=self.is_square)

    def fetch(self, target: Tensor) -> None:
        """Write it in 32 bits, to as many bytes."""
        _expand(self.held, in_order(target).view(torch.float32), is_square=self.is_square)

    def read(self, _number: int) -> Tensor:
        """Codes and scales of a slice."""
        return self.held

    def write(self, _number: int, _piece: Tensor) -> None:
        """They were changed."""
        increment_version(self.held)


class _OffloadedMoment(ByteSlices, Here):
    """An offloaded moment in 8 bits."""

    def __init__(self, like: Tensor, *, is_square: bool, tier: Tier) -> None:
        """One that is zero.

        Args:
            like: As :class:`_Moment` has it.
            is_square: As there.
            tier: Where it goes.
        """
        super().__init__(like.numel(), _bytes_of_moment, like.device, tier)
        self.is_square = is_square

    def take(self, wide: Tensor) -> None:
        """As :class:`_Moment` does."""
        numbers = in_order(wide)
        for number, (start, stop) in enumerate(slices_of(numbers.numel())):
            size = _bytes_of_moment(stop - start)
            piece = torch.empty(size, dtype=torch.uint8, device=wide.device)
            _shrink(numbers[start:stop], piece, is_square=self.is_square)
            self.write(number, piece)

    def fetch(self, target: Tensor) -> None:
        """As :class:`_Moment` does."""
        wide = in_order(target).view(torch.float32)
        for number, (start, stop) in enumerate(slices_of(wide.numel())):
            _expand(self.read(number), wide[start:stop], is_square=self.is_square)


class LowerSlices(ByteSlices):
    """The offloaded lower halves of a parameter."""

    def __init__(self, lower: Tensor, tier: Tier) -> None:
        """Have them go.

        Args:
            lower: They, which lie densely.
            tier: Where they go.
        """
        super().__init__(lower.numel(), _bytes_of_halves, lower.device, tier)
        for number, (start, stop) in enumerate(slices_of(lower.numel())):
            self.write(number, in_order(lower)[start:stop].clone().view(torch.uint8))

    def whole(self, upper: Tensor) -> Tensor:
        """All of them, which lie as their upper halves do."""
        lower = torch.empty_like(upper, dtype=torch.int16)
        for number, (start, stop) in enumerate(slices_of(lower.numel())):
            in_order(lower)[start:stop] = self.read(number).view(torch.int16)
        return lower


class EightBitState(AwayState):
    """State of one parameter, of which moments are in 8 bits; reads as a plain dictionary.

    Empty, it waits for the first update.

    Attributes:
        tier: Where moments are, and go slice by slice; ``None`` where they are in memory.
    """

    def __init__(self, values: Mapping[str, Any], number: int = 0) -> None:
        """Take over values, all of them in 32 bits.

        Args:
            values: The state.
            number: Tells it from other states of the optimizer.
        """
        super().__init__(values)
        self.tier: Tier | None = None
        self._number = number
        self._updates = 0
        self._parameter: weakref.ref[Tensor] | None = None

    def begin(self, optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> None:
        """Be the state before the first update.

        Args:
            optimizer: The optimizer.
            group: The group that lists the parameter.
            parameter: Whose state it is.
        """
        with self._lock:
            self._parameter = weakref.ref(parameter)
            if type(optimizer) is not SGD:
                # Where torch has it, whose own update may come after this one.
                device = parameter.device if group.get("fused") else None
                self["step"] = torch.zeros((), dtype=_step_dtype(), device=device)
            for key, is_square in moments_of(optimizer).items():
                moment = self._zero(parameter, is_square=is_square)
                self._away[key] = _stored(parameter, moment)
                dict.__setitem__(self, key, None)

    def shrink(self, optimizer: Optimizer, parameter: Tensor, tier: Tier | None = None) -> None:
        """Hold in 8 bits what is not, unless somebody keeps it.

        Args:
            optimizer: The optimizer.
            parameter: Whose state it is.
            tier: Where all of it goes, and lower halves with it; ``None`` where it stays in memory.
        """
        with self._lock:
            self._parameter = weakref.ref(parameter)
            if tier is not None and tier.refusal(parameter.device) is not None:
                tier = None
            if tier is not self.tier:
                for key in list(self._away):
                    self._bring(key)
                self.tier = tier
            self._have_lower_halves_go(parameter)
            for key, is_square in moments_of(optimizer).items():
                if key not in self or key in self._away or self._is_kept(key):
                    continue
                wide = dict.__getitem__(self, key)
                if is_narrow(parameter) and isinstance(wide, Tensor):
                    wide = wide.to(torch.float32)  # loading has it in the parameter's type
                if isinstance(wide, Tensor) and _goes_with(wide, parameter):
                    moment = self._zero(wide, is_square=is_square)
                    moment.take(wide)
                    # First: an interrupt may come between any two of these.
                    self._away[key] = _stored(wide, moment)
                    dict.__setitem__(self, key, None)
                    del wide

    def _zero(self, like: Tensor, *, is_square: bool) -> _Moment | _OffloadedMoment:
        """A moment of zeros where moments are."""
        if self.tier is None:
            return _Moment(like, is_square=is_square)
        return _OffloadedMoment(like, is_square=is_square, tier=self.tier)

    def _have_lower_halves_go(self, parameter: Tensor) -> None:
        """Have those of a parameter be where moments are."""
        lower = lower_half(parameter)
        if isinstance(lower, LowerSlices) and lower.tier is not self.tier:
            lower = lower.whole(parameter)
            belongs(lower, parameter)
        if isinstance(lower, Tensor) and self.tier is not None:
            belongs(LowerSlices(lower, self.tier), parameter)

    def send_left(self) -> None:
        """Send what could not go before.

        Raises:
            OffloadError: It cannot now, and stays in memory.
        """
        for slices in self._in_slices():
            slices.send_left()

    def left_bytes(self) -> int:
        """Bytes of what could not go."""
        return sum(piece.nbytes for piece in self._left())

    def _left(self) -> list[Tensor]:
        return [piece for slices in self._in_slices() for piece in slices.left()]

    def _in_slices(self) -> list[ByteSlices]:
        parameter = None if self._parameter is None else self._parameter()
        lower = None if parameter is None else lower_half(parameter)
        held: list[object] = [stored.parcel for stored in self._away.values()]
        return [it for it in (*held, lower) if isinstance(it, ByteSlices)]

    def is_narrow(self, optimizer: Optimizer) -> bool:
        """Whether all moments are in 8 bits.

        Args:
            optimizer: The optimizer.
        """
        return self._away.keys() >= moments_of(optimizer).keys()

    def slices(self, numbers: int) -> list[tuple[int, int]]:
        """Begin and end of each slice in which moments are.

        Args:
            numbers: How many they have.
        """
        return [(0, numbers)] if self.tier is None else list(slices_of(numbers))

    def held(self, keys: Iterable[str]) -> list[Tensor] | None:
        """Codes and scales of whole moments, where all are in memory and in 8 bits.

        Args:
            keys: The moments.
        """
        held = []
        for key in keys:
            stored = self._away.get(key)
            if stored is None or type(stored.parcel) is not _Moment:
                return None
            held.append(stored.parcel.held)
        return held

    @contextlib.contextmanager
    def codes(
        self, optimizer: Optimizer, number: int, start: int, stop: int
    ) -> Iterator[list[Tensor]]:
        """Codes and scales of a slice of all moments, to be changed; they go back after.

        What somebody keeps in 32 bits is written back.

        Args:
            optimizer: The optimizer.
            number: Which slice.
            start: Its first number.
            stop: One past its last.
        """
        pieces: dict[str, Tensor] = {}
        for key, is_square in moments_of(optimizer).items():
            stored = self._away.get(key)
            if stored is not None:
                pieces[key] = _moment_of(stored).read(number)
                continue
            wide = in_order(dict.__getitem__(self, key))[start:stop]
            moment = _Moment(wide, is_square=is_square)
            moment.take(wide)
            pieces[key] = moment.held
        yield list(pieces.values())
        for key, is_square in moments_of(optimizer).items():
            stored = self._away.get(key)
            if stored is not None:
                _moment_of(stored).write(number, pieces[key])
                continue
            wide = dict.__getitem__(self, key)
            _expand(pieces[key], in_order(wide)[start:stop], is_square=is_square)
            increment_version(wide)

    def next_seed(self) -> int:
        """What decides how the next update is rounded: another number each time and for each state.

        It follows the count of updates where the optimizer keeps one, as a checkpoint does.
        """
        self._updates += 1
        count = int(self.step().item()) if "step" in self else self._updates
        return (self._number * 0x9E3779B1 + count) & 0xFFFFFFFF

    def in_memory(self) -> dict[str, Any]:
        """What is there: codes and scales of what is in 8 bits, and lower halves."""
        parcels: dict[str, Any] = {key: stored.parcel for key, stored in self._away.items()}
        parameter = None if self._parameter is None else self._parameter()
        lower = None if parameter is None else lower_half(parameter)
        held = {key: it.held for key, it in parcels.items() if isinstance(it, _Moment)}
        if isinstance(lower, Tensor):
            held["lower_half"] = lower
        left = {f"{n}": it for n, it in enumerate(self._left())}
        return super().in_memory() | held | left

    def step(self) -> Tensor:
        """The count of updates, of an optimizer that has one."""
        count: Tensor = dict.__getitem__(self, "step")
        return count


def _shrink(wide: Tensor, held: Tensor, *, is_square: bool) -> None:
    if has_kernel(wide):
        _native.shrink_moment(is_square, memory_of(wide), memory_of(held))
    else:
        by_ops.shrink_moment(wide, held, is_square=is_square)


def _expand(held: Tensor, wide: Tensor, *, is_square: bool) -> None:
    if has_kernel(wide):
        _native.expand_moment(is_square, memory_of(held), memory_of(wide))
    else:
        by_ops.expand_moment(held, wide, is_square=is_square)


def _bytes_of_moment(numbers: int) -> int:
    """Codes, and a scale for each block."""
    return numbers + torch.float32.itemsize * -(-numbers // BLOCK)


def _bytes_of_halves(numbers: int) -> int:
    return torch.int16.itemsize * numbers


def _moment_of(stored: Stored) -> _Moment | _OffloadedMoment:
    moment = stored.parcel
    assert isinstance(moment, _Moment | _OffloadedMoment), "nothing else is sent by this state"
    return moment


def has_kernel(tensor: Tensor) -> bool:
    """Whether a tensor is where the kernel runs."""
    return tensor.is_cpu


def in_order(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that lie densely, in one dimension, as they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _stored(like: Tensor, moment: _Moment | _OffloadedMoment) -> Stored:
    return Stored(like.size(), like.stride(), torch.float32, like.device, moment)


def _goes_with(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor has a number of 32 bits for each of a parameter's, in the same order."""
    return tensor.dtype is torch.float32 and lies_as(tensor, parameter)


def lies_as(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor has a number for each of a parameter's, in the same order."""
    return (
        tensor.device == parameter.device
        and tensor.shape == parameter.shape
        and lies_densely(tensor)
        and _steps(tensor) == _steps(parameter)
    )


def _steps(tensor: Tensor) -> list[int]:
    """Strides of the dimensions in which a tensor has more than one number."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _step_dtype() -> torch.dtype:
    """The type that torch counts steps in."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
