"""The optimizer's state of one parameter in 8 bits, and the update that reads and writes it.

Responsible for :class:`EightBitState`, which stands for the plain dictionary in
``optimizer.state``, and for the update of a parameter that has one: one pass of a kernel
(``crates/memfit-memory/src/moments.rs``), in which nothing is allocated. Not responsible for which
parameters have one (:mod:`memfit.apply.precision.optimizer_bits`).

Whoever reads a moment gets it in 32 bits, and from then on it is so: writing to it counts. It is
shrunk again before the next step, unless somebody keeps it; until then torch's own update is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, AdamW

from memfit import _native
from memfit.apply.offload.state_view import AwayState, Stored
from memfit.apply.precision.narrow import Here, memory_of
from memfit.tensors.moments import group_refusal, lies_densely, moments_of, parameter_refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

_BLOCK = 256
"""Numbers that share a scale, as the engine has it (``Narrow::BLOCK``)."""


class _Moment(Here):
    """A moment in 8 bits."""

    __slots__ = ("held", "is_square")

    def __init__(self, numbers: int, *, is_square: bool) -> None:
        """One that is zero.

        Args:
            numbers: How many it has.
            is_square: Whether it is a mean of squares.
        """
        size = numbers + torch.float32.itemsize * -(-numbers // _BLOCK)
        self.held = torch.zeros(size, dtype=torch.uint8)
        self.is_square = is_square

    def take(self, wide: Tensor) -> None:
        """Write numbers of 32 bits, which lie densely."""
        _native.shrink_moment(self.is_square, memory_of(wide), memory_of(self.held))

    def fetch(self, target: Tensor) -> None:
        """Write it in 32 bits."""
        _native.expand_moment(self.is_square, memory_of(self.held), memory_of(target))


class EightBitState(AwayState):
    """State of one parameter, of which moments are in 8 bits; reads as a plain dictionary.

    Empty, it waits for the first update.
    """

    def begin(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Be the state before the first update.

        Args:
            optimizer: The optimizer.
            parameter: Whose state it is.
        """
        with self._lock:
            if type(optimizer) is not SGD:
                self["step"] = torch.zeros((), dtype=_step_dtype())
            for key, is_square in moments_of(optimizer).items():
                moment = _Moment(parameter.numel(), is_square=is_square)
                self._away[key] = _stored(parameter, moment)
                dict.__setitem__(self, key, None)

    def shrink(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Hold in 8 bits what is not, unless somebody keeps it.

        Args:
            optimizer: The optimizer.
            parameter: Whose state it is.
        """
        with self._lock:
            for key, is_square in moments_of(optimizer).items():
                if key not in self or key in self._away or self._is_kept(key):
                    continue
                wide = dict.__getitem__(self, key)
                if isinstance(wide, Tensor) and _goes_with(wide, parameter):
                    moment = _Moment(wide.numel(), is_square=is_square)
                    moment.take(wide)
                    # First: an interrupt may come between any two of these.
                    self._away[key] = _stored(wide, moment)
                    dict.__setitem__(self, key, None)
                    del wide

    def held(self, optimizer: Optimizer) -> list[Tensor] | None:
        """Codes and scales of all moments; ``None`` where one is in 32 bits.

        Args:
            optimizer: The optimizer.
        """
        parcels = [self._away[key].parcel for key in moments_of(optimizer) if key in self._away]
        held = [parcel.held for parcel in parcels if isinstance(parcel, _Moment)]
        return held if len(held) == len(moments_of(optimizer)) else None

    def in_memory(self) -> dict[str, Any]:
        """What is there: codes and scales of what is in 8 bits."""
        parcels = {key: stored.parcel for key, stored in self._away.items()}
        held = {key: it.held for key, it in parcels.items() if isinstance(it, _Moment)}
        return super().in_memory() | held

    def step(self) -> Tensor:
        """The count of updates, of an optimizer that has one."""
        count: Tensor = dict.__getitem__(self, "step")
        return count


def updated_in_eight_bits(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> bool:
    """Update a parameter by its gradient, if its state is in 8 bits.

    Args:
        optimizer: Its optimizer.
        group: The group that lists it.
        parameter: The parameter, with its gradient.

    Returns:
        Whether that was done; otherwise torch's own update is to be.
    """
    state, gradient = optimizer.state.get(parameter), parameter.grad
    if not isinstance(state, EightBitState) or gradient is None:
        return False
    if group_refusal(optimizer, group) or parameter_refusal(parameter):
        return False
    if not _goes_with(gradient, parameter):
        return False
    is_first = not state
    if is_first:
        state.begin(optimizer, parameter)
    held = state.held(optimizer)
    if held is None:
        return False
    numbers, slopes = memory_of(parameter), memory_of(gradient)
    threads = torch.get_num_threads()
    if type(optimizer) is SGD:
        by_momentum = _momentum(group, is_first=is_first)
        _native.update_by_momentum(by_momentum, numbers, slopes, memory_of(held[0]), threads)
    else:
        count = state.step()
        count.fill_(count.item() + 1)
        by_adam = _adam(optimizer, group, count.item())
        first, second = map(memory_of, held)
        _native.update_by_adam(by_adam, numbers, slopes, first, second, threads)
    for changed in (parameter, *held):
        increment_version(changed)
    return True


def _adam(optimizer: Optimizer, group: Mapping[str, Any], count: float) -> dict[str, float]:
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    first, second = (float(beta) for beta in group["betas"])
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
    return {
        "direction": -1.0 if group.get("maximize") else 1.0,
        "penalty": 0.0 if decoupled else decay,
        "decay": 1.0 - rate * decay if decoupled else 1.0,
        "first_added": 1.0 - first,
        "second_stays": second,
        "second_added": 1.0 - second,
        "step": rate / (1.0 - first**count),
        "root_correction": (1.0 - second**count) ** -0.5,
        "epsilon": float(group["eps"]),
    }


def _momentum(group: Mapping[str, Any], *, is_first: bool) -> dict[str, float | None]:
    stays = float(group["momentum"])
    return {
        "direction": -1.0 if group.get("maximize") else 1.0,
        "penalty": float(group["weight_decay"]),
        "stays": 0.0 if is_first else stays,
        "added": 1.0 if is_first else 1.0 - float(group["dampening"]),
        "nesterov": stays if group.get("nesterov") else None,
        "step": float(group["lr"]),
    }


def _stored(like: Tensor, moment: _Moment) -> Stored:
    return Stored(like.size(), like.stride(), torch.float32, like.device, moment)


def _goes_with(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor has a number of 32 bits for each of a parameter's, in the same order."""
    return (
        tensor.dtype is torch.float32
        and tensor.device == parameter.device
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
