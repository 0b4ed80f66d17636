"""The optimizer's state of one parameter in 8 bits, and the update that reads and writes it.

Responsible for :class:`EightBitState`, which stands for the plain dictionary in
``optimizer.state``, and for the update of a parameter that has one: on a CPU one pass of a kernel
(``crates/memfit-memory/src/moments.rs``), in which nothing is allocated, elsewhere torch's ops
(:mod:`memfit.apply.precision.moments_by_ops`). A parameter in ``bfloat16`` is updated by nothing
else, and rounded at random. Not responsible for which parameters have one
(:mod:`memfit.apply.precision.optimizer_bits`).

Whoever reads a moment gets it in 32 bits, and from then on it is so: writing to it counts. It is
shrunk again before the next step, unless somebody keeps it; until then torch's own update is used.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, AdamW

from memfit import _native
from memfit.apply.offload.state_view import AwayState, Stored
from memfit.apply.precision import moments_by_ops as by_ops
from memfit.apply.precision.narrow import BLOCK, Here, memory_of
from memfit.errors import UsageError
from memfit.tensors.moments import group_refusal, lies_densely, moments_of, parameter_refusal
from memfit.tensors.narrow_parameters import belongs, is_narrow, lower_half

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.optim import Optimizer


class _Moment(Here):
    """A moment in 8 bits."""

    __slots__ = ("held", "is_square")

    def __init__(self, like: Tensor, *, is_square: bool) -> None:
        """One that is zero.

        Args:
            like: What it has as many numbers as, where that is.
            is_square: Whether it is a mean of squares.
        """
        numbers = like.numel()
        size = numbers + torch.float32.itemsize * -(-numbers // BLOCK)
        self.held = torch.zeros(size, dtype=torch.uint8, device=like.device)
        self.is_square = is_square

    def take(self, wide: Tensor) -> None:
        """Write numbers of 32 bits, which lie densely."""
        if has_kernel(wide):
            _native.shrink_moment(self.is_square, memory_of(wide), memory_of(self.held))
        else:
            by_ops.shrink_moment(in_order(wide), self.held, is_square=self.is_square)

    def fetch(self, target: Tensor) -> None:
        """Write it in 32 bits, to as many bytes."""
        if has_kernel(target):
            _native.expand_moment(self.is_square, memory_of(self.held), memory_of(target))
        else:
            wide = in_order(target).view(torch.float32)
            by_ops.expand_moment(self.held, wide, is_square=self.is_square)


class EightBitState(AwayState):
    """State of one parameter, of which moments are in 8 bits; reads as a plain dictionary.

    Empty, it waits for the first update.
    """

    def __init__(self, values: Mapping[str, Any], number: int = 0) -> None:
        """Take over values, all of them in 32 bits.

        Args:
            values: The state.
            number: Tells it from other states of the optimizer.
        """
        super().__init__(values)
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
                moment = _Moment(parameter, is_square=is_square)
                self._away[key] = _stored(parameter, moment)
                dict.__setitem__(self, key, None)

    def shrink(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Hold in 8 bits what is not, unless somebody keeps it.

        Args:
            optimizer: The optimizer.
            parameter: Whose state it is.
        """
        with self._lock:
            self._parameter = weakref.ref(parameter)
            for key, is_square in moments_of(optimizer).items():
                if key not in self or key in self._away or self._is_kept(key):
                    continue
                wide = dict.__getitem__(self, key)
                if is_narrow(parameter) and isinstance(wide, Tensor):
                    wide = wide.to(torch.float32)  # loading has it in the parameter's type
                if isinstance(wide, Tensor) and _goes_with(wide, parameter):
                    moment = _Moment(wide, is_square=is_square)
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
        keys = moments_of(optimizer)
        return [self.codes(key) for key in keys] if self._away.keys() >= keys.keys() else None

    def codes(self, key: str) -> Tensor:
        """Codes and scales of a moment that is in 8 bits.

        Args:
            key: Which.
        """
        moment = self._away[key].parcel
        assert isinstance(moment, _Moment), "nothing else is sent by this state"
        return moment.held

    def wide(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The moments that are in 32 bits, as somebody keeps them.

        Args:
            optimizer: The optimizer.
        """
        there = (key for key in moments_of(optimizer) if key not in self._away)
        return {key: dict.__getitem__(self, key) for key in there}

    def next_seed(self) -> int:
        """What decides how the next update is rounded: another number each time and for each state.

        It follows the count of updates where the optimizer keeps one, as a checkpoint does.
        """
        self._updates += 1
        count = int(self.step().item()) if "step" in self else self._updates
        return (self._number * 0x9E3779B1 + count) & 0xFFFFFFFF

    def in_memory(self) -> dict[str, Any]:
        """What is there: codes and scales of what is in 8 bits, and lower halves."""
        parcels = {key: stored.parcel for key, stored in self._away.items()}
        held = {key: it.held for key, it in parcels.items() if isinstance(it, _Moment)}
        parameter = None if self._parameter is None else self._parameter()
        lower = None if parameter is None else lower_half(parameter)
        if lower is not None:
            held["lower_half"] = lower
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
    refusal = group_refusal(optimizer, group) or parameter_refusal(parameter)
    if not refusal and (gradient.dtype is not parameter.dtype or not _lies_as(gradient, parameter)):
        refusal = "its gradient is of another type or order"
    if refusal:
        return _left_to_torch(parameter, refusal)
    if _is_overflow(optimizer):
        return True  # as torch has it: a step that does nothing, and is not counted
    is_first = not state
    if is_first:
        state.begin(optimizer, group, parameter)
    held = state.held(optimizer)
    if held is None and not is_narrow(parameter):
        return False
    _scale_back(optimizer, gradient)
    around = _held_meanwhile(state, optimizer) if held is None else contextlib.nullcontext(held)
    lower = lower_half(parameter)
    with around as held:
        _run(optimizer, group, parameter, lower, state, held, is_first=is_first)
        for changed in (parameter, *held):
            increment_version(changed)
        if lower is not None:
            belongs(lower, parameter)
    return True


def _left_to_torch(parameter: Tensor, refusal: str) -> bool:
    """Have torch update a parameter, which it does not where it is narrow.

    Raises:
        UsageError: It is.
    """
    if is_narrow(parameter):
        message = (
            f"a parameter of shape {list(parameter.shape)} is held in bfloat16, and memfit cannot "
            f"update it: {refusal}\nhint: plan again with `half_parameters` forbidden"
        )
        raise UsageError(message)
    return False


def _is_overflow(optimizer: Optimizer) -> bool:
    """Whether a ``GradScaler`` has found what is not finite, and left it to a fused step to see."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.item())


def _scale_back(optimizer: Optimizer, gradient: Tensor) -> None:
    """Divide a gradient by the scale that a ``GradScaler`` has left to a fused step.

    See ``GradScaler.step`` (``torch/amp/grad_scaler.py``): it calls an optimizer that takes scales,
    such as a fused one, in any case, and says both of them by attributes.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if isinstance(scale, Tensor):
        gradient.div_(scale.to(gradient.device))


@contextlib.contextmanager
def _held_meanwhile(state: EightBitState, optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Codes and scales of all moments; what somebody keeps in 32 bits is written back after."""
    wide = state.wide(optimizer)
    kinds = moments_of(optimizer)
    copies = {key: _Moment(wide[key], is_square=kinds[key]) for key in wide}
    for key, moment in copies.items():
        moment.take(wide[key])
    yield [copies[key].held if key in copies else state.codes(key) for key in kinds]
    for key, moment in copies.items():
        moment.fetch(wide[key])
        increment_version(wide[key])


def _run(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    lower: Tensor | None,
    state: EightBitState,
    held: list[Tensor],
    *,
    is_first: bool,
) -> None:
    """One pass over all numbers."""
    assert parameter.grad is not None, "asked for only with one"
    seed = state.next_seed() if is_narrow(parameter) and lower is None else None
    is_momentum = type(optimizer) is SGD
    if is_momentum:
        rule: dict[str, Any] = _momentum(group, is_first=is_first)
    else:
        count = state.step()
        count.fill_(count.item() + 1)
        rule = _adam(optimizer, group, count.item())
    rule["seed"] = seed
    if not has_kernel(parameter):
        update = by_ops.update_by_momentum if is_momentum else by_ops.update_by_adam
        lower_memory = None if lower is None else in_order(lower)
        update(rule, in_order(parameter), in_order(parameter.grad), *held, lower=lower_memory)
        return
    threads = torch.get_num_threads()
    below = None if lower is None else memory_of(lower)
    numbers, slopes, *moments = map(memory_of, (parameter, parameter.grad, *held))
    if is_momentum:
        _native.update_by_momentum(rule, numbers, slopes, moments[0], threads, below)
    else:
        _native.update_by_adam(rule, numbers, slopes, moments[0], moments[1], threads, below)


def has_kernel(tensor: Tensor) -> bool:
    """Whether a tensor is where the kernel runs."""
    return tensor.device.type == "cpu"


def in_order(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that lie densely, in one dimension, as they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


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
    return tensor.dtype is torch.float32 and _lies_as(tensor, parameter)


def _lies_as(tensor: Tensor, parameter: Tensor) -> bool:
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
