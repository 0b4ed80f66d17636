"""Updates of parameters whose optimizer state is in 8 bits.

Responsible for the update of one parameter by its gradient: on a CPU one pass of a kernel that
allocates nothing (``crates/memfit-memory/src/moments.rs``), on other devices torch's ops
(:mod:`memfit.apply.precision.moments_by_ops`). A parameter in ``bfloat16`` is updated by nothing
else, and rounded at random. Not responsible for the state
(:mod:`memfit.apply.precision.eight_bit_state`) nor for which parameters have one
(:mod:`memfit.apply.precision.optimizer_bits`).

A model has hundreds of small parameters, whose numbers take less time than what is asked of each
before: so that is asked once a step where it is the same for all, and briefly where it mostly is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, AdamW

from memfit import _native
from memfit.apply.precision import eight_bit_state
from memfit.apply.precision import moments_by_ops as by_ops
from memfit.apply.precision.eight_bit_state import EightBitState, LowerSlices, in_order, lies_as
from memfit.apply.precision.narrow import memory_of
from memfit.errors import UsageError
from memfit.tensors.moments import group_refusal, moments_of, parameter_refusal
from memfit.tensors.narrow_parameters import belongs, is_narrow, lower_half

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

_Rule = dict[str, float | None]


class EightBitUpdates:
    """The updates of one step of an optimizer, of parameters whose state is in 8 bits."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Begin a step.

        Args:
            optimizer: The optimizer.
        """
        self._optimizer = optimizer
        self._keys = moments_of(optimizer).keys()
        self._refusals: dict[int, str | None] = {}
        self._rules: dict[tuple[int, float, bool], _Rule] = {}

    def update(self, group: Mapping[str, Any], parameter: Tensor) -> bool:
        """Update a parameter by its gradient, if its state is in 8 bits.

        Args:
            group: The group that lists it.
            parameter: The parameter, with its gradient.

        Returns:
            Whether that was done; otherwise torch's own update is to be.
        """
        optimizer = self._optimizer
        state, gradient = optimizer.state.get(parameter), parameter.grad
        if not isinstance(state, EightBitState) or gradient is None:
            return False
        if refusal := self._refusal(group) or _refusal(parameter, gradient):
            return _left_to_torch(parameter, refusal)
        if self._is_overflow:
            return True  # as torch has it: a step that does nothing, and is not counted
        is_first = not state
        if is_first:
            state.begin(optimizer, group, parameter)
        is_half = is_narrow(parameter)
        held = state.held(self._keys)
        if held is None and not is_half and not state.is_narrow(optimizer):
            return False
        if self._scale is not None:
            gradient.div_(self._scale.to(gradient.device))
        rule = self._rule(group, state, is_first=is_first)
        if held is None or is_half:
            self._update_slices(rule, state, parameter, gradient)
        else:
            _run(rule, parameter, gradient, held, None)
            increment_version((parameter, *held))
        return True

    def _update_slices(
        self,
        rule: _Rule,
        state: EightBitState,
        parameter: Tensor,
        gradient: Tensor,
    ) -> None:
        """Update a parameter by slices; nothing of what came for one is left in memory after it."""
        lower = lower_half(parameter)
        if is_narrow(parameter) and lower is None:
            rule = {**rule, "seed": state.next_seed()}
        if isinstance(lower, LowerSlices) and lower.tier is not state.tier:
            lower = lower.whole(parameter)  # somebody has put another state here
        for number, (start, stop) in enumerate(state.slices(parameter.numel())):
            numbers, slopes = (in_order(it)[start:stop] for it in (parameter, gradient))
            below = None
            if isinstance(lower, LowerSlices):
                below = lower.read(number)
            elif isinstance(lower, Tensor):
                below = in_order(lower)[start:stop].view(torch.uint8)
            with state.codes(self._optimizer, number, start, stop) as held:
                _run(rule, numbers, slopes, held, below)
            if isinstance(lower, LowerSlices):
                assert below is not None, "it was read"
                lower.write(number, below)
        increment_version(parameter)
        if lower is not None:
            belongs(lower, parameter)

    @functools.cached_property
    def _is_overflow(self) -> bool:
        """Whether a ``GradScaler`` found an infinity or NaN, and left the skipping to the step."""
        found = getattr(self._optimizer, "found_inf", None)
        return isinstance(found, Tensor) and bool(found.item())

    @functools.cached_property
    def _scale(self) -> Tensor | None:
        """What a ``GradScaler`` has left to a fused step to divide gradients by.

        See ``GradScaler.step`` (``torch/amp/grad_scaler.py``): it calls an optimizer that takes
        scales, such as a fused one, in any case, and says both of them by attributes.
        """
        scale = getattr(self._optimizer, "grad_scale", None)
        return scale if isinstance(scale, Tensor) else None

    def _refusal(self, group: Mapping[str, Any]) -> str | None:
        """Why the state of a group's parameters has no such form."""
        if id(group) not in self._refusals:
            self._refusals[id(group)] = group_refusal(self._optimizer, group)
        return self._refusals[id(group)]

    def _rule(self, group: Mapping[str, Any], state: EightBitState, *, is_first: bool) -> _Rule:
        """What an update computes with; the count of updates is one more."""
        is_momentum, count = type(self._optimizer) is SGD, 0.0
        if not is_momentum:
            steps = state.step()
            count = steps.item() + 1
            steps.fill_(count)
        key = id(group), count, is_first
        rule = self._rules.get(key)
        if rule is None:
            rule = (
                _momentum(group, is_first=is_first)
                if is_momentum
                else _adam(self._optimizer, group, count)
            )
            self._rules[key] = rule
        return rule


def _refusal(parameter: Tensor, gradient: Tensor) -> str | None:
    """Why a parameter has no such update by this gradient."""
    if _lie_plainly(parameter, gradient):
        return None
    if refusal := parameter_refusal(parameter):
        return refusal
    if gradient.dtype is not parameter.dtype or not lies_as(gradient, parameter):
        return "its gradient is of another type or order"
    return None


def _lie_plainly(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether numbers of 32 bits lie where the kernel runs, in the order of dimensions.

    Then nothing needs to be asked that takes longer.
    """
    return (
        type(parameter) is nn.Parameter
        and type(gradient) is Tensor
        and parameter.is_cpu
        and gradient.is_cpu
        and parameter.dtype is torch.float32
        and gradient.dtype is torch.float32
        and parameter.layout is torch.strided
        and gradient.layout is torch.strided
        and parameter.is_contiguous()
        and gradient.is_contiguous()
        and gradient.shape == parameter.shape
        and parameter.numel() > 0
    )


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


def _run(
    rule: _Rule, numbers: Tensor, slopes: Tensor, held: list[Tensor], below: Tensor | None
) -> None:
    """One pass over numbers that lie densely, by their slopes, codes and scales.

    Args:
        rule: What it computes with.
        numbers: A parameter, or a slice of it.
        slopes: Its gradient.
        held: Its moments.
        below: Its lower halves, or their bytes.
    """
    is_momentum = len(held) == 1
    if not eight_bit_state.has_kernel(numbers):
        update = by_ops.update_by_momentum if is_momentum else by_ops.update_by_adam
        halves = None if below is None else in_order(below).view(torch.int16)
        update(rule, in_order(numbers), in_order(slopes), *held, lower=halves)
        return
    threads = torch.get_num_threads()
    lower = None if below is None else memory_of(below)
    parameter, gradient = memory_of(numbers), memory_of(slopes)
    if is_momentum:
        held_at = memory_of(held[0])
        _native.update_by_momentum(rule, parameter, gradient, held_at, threads, lower)
    else:
        first, second = memory_of(held[0]), memory_of(held[1])
        _native.update_by_adam(rule, parameter, gradient, first, second, threads, lower)


def _adam(optimizer: Optimizer, group: Mapping[str, Any], count: float) -> _Rule:
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
        "seed": None,
    }


def _momentum(group: Mapping[str, Any], *, is_first: bool) -> _Rule:
    stays = float(group["momentum"])
    return {
        "direction": -1.0 if group.get("maximize") else 1.0,
        "penalty": float(group["weight_decay"]),
        "stays": 0.0 if is_first else stays,
        "added": 1.0 if is_first else 1.0 - float(group["dampening"]),
        "nesterov": stays if group.get("nesterov") else None,
        "step": float(group["lr"]),
        "seed": None,
    }
