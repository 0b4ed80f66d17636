"""Hooks of a model, which see each piece of a batch by itself.

Responsible for finding them. Hooks on tensors that a forward makes are not found, nor needed: the
gradient of an activation's row is the same whatever other rows are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from memfit.tensors.optimizers import is_of_memfit


def gradient_hooks(model: nn.Module) -> str | None:
    """Why the gradients of micro-batches must not be added up; ``None`` where they may be.

    Args:
        model: The model, its own hooks and those of its parameters.
    """
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if not all(is_of_memfit(hook) for kind in hooks for hook in (kind or {}).values()):
            return f"`{name}` has a hook on its gradient, which would see that of each piece"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"`{name or 'the model'}` has a backward hook, which would see each piece"
    return None


def forward_hooks(model: nn.Module, *, own: bool, ours: bool = True) -> str | None:
    """Why a forward must not run in pieces; ``None`` where no hook would see them.

    Args:
        model: The model.
        own: Whether its own hooks count as well as those of modules inside it.
        ours: Whether memfit's count: a plan's are in place while a step runs by it.
    """
    everywhere = nn.modules.module

    def are_counted(*kinds: Mapping[int, Any]) -> bool:
        return any(ours or not is_of_memfit(hook) for kind in kinds for hook in kind.values())

    if are_counted(everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks):
        return "all modules have a forward hook, which would see each piece"
    for name, module in model.named_modules():
        if not own and module is model:
            continue
        if are_counted(module._forward_hooks, module._forward_pre_hooks):
            return f"`{name or 'the model'}` has a forward hook, which would see each piece"
    return None


_OF_CLASSES: WeakKeyDictionary[type[nn.Module], Any] = WeakKeyDictionary()
"""The ``forward`` of each class when it was first looked at."""


def another_forward(model: nn.Module, known: frozenset[str] = frozenset()) -> str | None:
    """Which module runs another forward by now, as a clause; ``None`` where none does.

    Args:
        model: The model.
        known: Names of modules that may have a ``forward`` of their own.
    """
    for name, it in model.named_modules():
        called, kind = name or "the model", type(it)
        own = vars(it).get("forward")
        if name not in known and own is not None and not is_of_memfit(own):
            return f"`{called}` has a `forward` of its own, which would see each piece"
        if _OF_CLASSES.setdefault(kind, kind.forward) is not kind.forward:
            return f"the class of `{called}` has another `forward` by now"
    return None


def own_forwards(model: nn.Module) -> frozenset[str]:
    """Names of modules that have a ``forward`` of their own, other than memfit's.

    Args:
        model: The model.
    """
    held = ((name, vars(it).get("forward")) for name, it in model.named_modules())
    return frozenset(name for name, it in held if it is not None and not is_of_memfit(it))
