"""Optimizers: whether each parameter is on its own, and what of its state is in memory.

Not responsible for what an update costs (:mod:`memfit.capture.probe.optimizer_updates`) nor for
offloading its state (:mod:`memfit.apply.offload.optimizer_state`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

_PER_PARAMETER: tuple[type[Optimizer], ...] = (
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    SGD,
)


class PartlyOffloaded:
    """The state of one parameter, of which some may be offloaded."""

    def in_memory(self) -> dict[str, Any]:
        """What is in memory, or on its way there; nothing is fetched."""
        raise NotImplementedError


def in_memory(state: Any) -> Any:
    """What of a parameter's state is in memory, for those who only look: it stays where it is.

    Args:
        state: The state, whatever it is.
    """
    return state.in_memory() if isinstance(state, PartlyOffloaded) else state


def unknown_optimizer(optimizer: Optimizer) -> str | None:
    """Why an optimizer is not trusted to update each parameter on its own; ``None`` if it is.

    Args:
        optimizer: The optimizer.
    """
    if type(optimizer) in _PER_PARAMETER:
        return None
    return f"`{type(optimizer).__name__}` is not known to update each parameter on its own"


def shared_state(optimizer: Optimizer) -> str | None:
    """Why parameters are not each on its own; ``None`` when they are.

    Args:
        optimizer: The optimizer.

    Returns:
        One clause: a parameter is in two groups, or a state tensor belongs to two parameters.
    """
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    states = [
        value.untyped_storage()._cdata
        for state in optimizer.state.values()
        for value in in_memory(state).values()
        if isinstance(value, Tensor) and value.layout is torch.strided
    ]
    if len(held) == len(set(held)) and len(states) == len(set(states)):
        return None
    return f"`{type(optimizer).__name__}` shares parameters or state between its groups"
