"""Moments of optimizers that have a form in 8 bits, and which parameters' they are.

Responsible for the table of them, and for why an optimizer or a parameter has no such form. Not
responsible for the form (:mod:`memfit.apply.precision.eight_bit_state`) nor for updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from memfit.tensors.narrow_parameters import own_type
from memfit.tensors.storage import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

LEAST_NUMBERS = 4096
"""State of smaller parameters stays in 32 bits, as in the engine (``optimizer_bits.rs``)."""

_OF_ADAM = {"exp_avg": False, "exp_avg_sq": True}
_MOMENTS: dict[type[Optimizer], Mapping[str, bool]] = {
    AdamW: _OF_ADAM,
    Adam: _OF_ADAM,
    SGD: {"momentum_buffer": False},
}
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


def moments_of(optimizer: Optimizer) -> Mapping[str, bool]:
    """Keys of an optimizer's moments, each with whether it is a mean of squares.

    There are none where they have no form in 8 bits.

    Args:
        optimizer: The optimizer.
    """
    return _MOMENTS.get(type(optimizer), {})


def group_refusal(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why the state of a group's parameters has no form in 8 bits; ``None`` where it has.

    Args:
        optimizer: The optimizer.
        group: One of its groups.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in _MOMENTS:
        return f"`{name}` has no form in 8 bits: AdamW, Adam and SGD with momentum have"
    for setting in _UNSUPPORTED:
        if group.get(setting):
            return f"`{name}` with `{setting}` has no form in 8 bits"
    if type(optimizer) is SGD and not group.get("momentum"):
        return "`SGD` without momentum keeps no state"
    return None


def eight_bit_refusal(optimizer: Optimizer) -> str | None:
    """Why an optimizer's state has no form in 8 bits; ``None`` where it has.

    Args:
        optimizer: The optimizer.

    Returns:
        One clause.
    """
    for group in optimizer.param_groups:
        if refusal := group_refusal(optimizer, group):
            return refusal
        for parameter in group["params"]:
            if parameter.dtype is not torch.float32 or parameter.numel() < LEAST_NUMBERS:
                continue
            if refusal := parameter_refusal(parameter):
                return refusal
    return None


def parameter_refusal(parameter: Tensor) -> str | None:
    """Why the state of one parameter has no form in 8 bits; ``None`` where it has.

    Args:
        parameter: The parameter.
    """
    what = f"a parameter of shape {list(parameter.shape)}"
    if parameter.device.type not in {"cpu", "cuda"}:
        kind = parameter.device.type
        return f"{what} is on `{kind}`, where memfit makes no updates of state in 8 bits"
    if own_type(parameter) is not torch.float32:
        return f"{what} is of type {parameter.dtype}, not torch.float32"
    if not lies_densely(parameter):
        return f"{what} does not lie densely in memory"
    return None


def lies_densely(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie side by side, in whichever order.

    Args:
        tensor: The tensor.
    """
    if tensor.layout is not torch.strided or is_wrapper(type(tensor)):
        return False
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()
