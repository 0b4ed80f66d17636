"""Optimizers: whether each parameter is on its own, and what of its state is in memory.

Not responsible for what an update costs (:mod:`memfit.capture.probe.optimizer_updates`) nor for
offloading its state (:mod:`memfit.apply.offload.optimizer_state`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
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
    SparseAdam,
)
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

from memfit.libraries import module_name

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
    SparseAdam,
)


_NOT_ELEMENTWISE: tuple[type[Optimizer], ...] = (Adafactor, SparseAdam)
"""Of those, the ones whose update of an element depends on other elements of the parameter, or
leaves out those of rows that have no gradient."""


class PartlyOffloaded:
    """The state of one parameter, of which some may be offloaded."""

    def in_memory(self) -> dict[str, Any]:
        """What is in memory, or on its way there; nothing is fetched."""
        raise NotImplementedError

    def with_room(self) -> dict[str, Any]:
        """What is in memory, and room for what is elsewhere; nothing is fetched."""
        raise NotImplementedError


def in_memory(state: Any) -> Any:
    """What of a parameter's state is in memory, for those who only look: it stays where it is.

    Args:
        state: The state, whatever it is.
    """
    return state.in_memory() if isinstance(state, PartlyOffloaded) else state


def state_tensors(state: Any) -> list[Tensor]:
    """The tensors of a parameter's state that are in memory.

    Args:
        state: The state, whatever it is; libraries hold tensors in objects of their own too.
    """
    leaves = tree_leaves(dict(in_memory(state)))
    held = [vars(leaf) if _holds_tensors(leaf) else leaf for leaf in leaves]
    return [tensor for tensor in tree_leaves(held) if isinstance(tensor, Tensor)]


def _holds_tensors(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor | type) and isinstance(getattr(leaf, "__dict__", None), dict)


def with_room(state: Any) -> Any:
    """A parameter's state with room instead of what is elsewhere, for who wants sizes on fakes.

    Args:
        state: The state, whatever it is.
    """
    return state.with_room() if isinstance(state, PartlyOffloaded) else state


def unknown_optimizer(optimizer: Optimizer) -> str | None:
    """Why an optimizer is not trusted to update each parameter on its own; ``None`` if it is.

    Args:
        optimizer: The optimizer.
    """
    if type(optimizer) in _PER_PARAMETER:
        return None
    return f"`{type(optimizer).__name__}` is not known to update each parameter on its own"


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each element of a parameter on its own.

    Args:
        optimizer: The optimizer.
    """
    kind = type(optimizer)
    return kind in _PER_PARAMETER and kind not in _NOT_ELEMENTWISE


def step_of_others(optimizer: Optimizer, *, before_only: bool = False) -> str | None:
    """Why a step has to run as a whole: code that is not torch's belongs to it; ``None`` without.

    Such code (clipping, scaling, logging) expects every gradient, before the first update. It may
    be attached to the optimizer, to all optimizers, to the class, at any time.

    Args:
        optimizer: The optimizer.
        before_only: Whether hooks that run after all updates do not matter.
    """
    name = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks:
        return f"`{name}` has hooks that run before its step"
    if optimizer._optimizer_step_post_hooks and not before_only:
        return f"`{name}` has hooks that run after its step"
    if any(not is_of_memfit(hook) for hook in _global_optimizer_pre_hooks.values()):
        return "all optimizers have hooks before their steps"
    replaced = vars(optimizer).get("step")
    if replaced is not None and not _is_of_torch(replaced):
        return f"the `step` of `{name}` was replaced"
    # The step of a class that is not torch's is not torch's by right: that is another question.
    step: Any = type(optimizer).step if type(optimizer) in _PER_PARAMETER else None
    while step is not None:
        if not _is_of_torch(step):
            return f"`{name}.step` was replaced"
        step = getattr(step, "__wrapped__", None)
    return None


def gradients_reduced_later(model: nn.Module) -> str | None:
    """Why a gradient is not final when it is complete; ``None`` where it is.

    ``DistributedDataParallel`` reduces buckets of gradients over all processes once all of a bucket
    are there.

    Args:
        model: The model.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return "`DistributedDataParallel` reduces gradients after they are complete"
    return None


def is_of_memfit(hook: Any) -> bool:
    """Whether a hook is one that memfit attached.

    Args:
        hook: Any hook.
    """
    return module_name(hook).startswith("memfit.")


_TORCH = Path(torch.__file__).parent


def _is_of_torch(function: Any) -> bool:
    """Whether the code of a function is torch's; a scheduler replaces a step by its own."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and _TORCH in Path(code.co_filename).parents


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
