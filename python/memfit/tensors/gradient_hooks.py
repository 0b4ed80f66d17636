"""Hooks of a model, which see each piece of a batch by itself.

Responsible for finding them. Hooks on tensors that a forward makes are not found, nor needed: the
gradient of an activation's row is the same whatever other rows are there.
"""

from __future__ import annotations

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


def forward_hooks(model: nn.Module, *, own: bool) -> str | None:
    """Why a forward must not run in pieces; ``None`` where no hook would see them.

    Args:
        model: The model.
        own: Whether its own hooks count, besides those of modules inside it.
    """
    for name, module in model.named_modules():
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks and (own or module is not model):
            return f"`{name or 'the model'}` has a forward hook, which would see each piece"
    return None
