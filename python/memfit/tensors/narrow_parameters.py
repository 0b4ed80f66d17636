"""Parameters that memfit holds in ``bfloat16`` for the time being.

Responsible for narrowing a parameter in place and widening it again, for telling which ones are
narrow, and for why one cannot be. The parameter stays the same object: ties, hooks and the
optimizer's groups hold. Not responsible for which are narrowed (the engine) nor for when
(:mod:`memfit.apply.precision.half_parameters`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from memfit.tensors.barrier import owner_of, without_barrier

if TYPE_CHECKING:
    from collections.abc import MutableMapping

NARROW = torch.bfloat16
"""What they are narrowed to."""

_ORDINARY = (nn.Parameter, Tensor, FakeTensor)
"""Classes of parameters whose numbers, if they have any, are what torch says."""

_WIDE: MutableMapping[Tensor, torch.dtype] = WeakIdKeyDictionary()
"""What each was before."""


def narrow(parameter: Tensor) -> None:
    """Hold a parameter of 32 bits in ``bfloat16``, and a gradient that it has.

    Args:
        parameter: The parameter; another type stays as it is.
    """
    if parameter.dtype is torch.float32:
        _WIDE[parameter] = parameter.dtype
        _convert(parameter, NARROW)


def widen(parameters: Iterable[Tensor]) -> None:
    """Hold what is narrow as it was before, with the values that it has now.

    Args:
        parameters: Those that may be; the others stay as they are.
    """
    if not _WIDE:
        return  # before the first is asked for: every step begins with this
    for parameter in parameters:
        if is_narrow(parameter):
            _convert(parameter, _WIDE[parameter])
        _WIDE.pop(parameter, None)


def is_narrow(parameter: Tensor) -> bool:
    """Whether a parameter is held in ``bfloat16`` by memfit, not by its owner.

    Args:
        parameter: The parameter.
    """
    return parameter.dtype is NARROW and parameter in _WIDE


def own_type(parameter: Tensor) -> torch.dtype:
    """The type that a parameter has when memfit does not narrow it.

    Args:
        parameter: The parameter.
    """
    return _WIDE[parameter] if is_narrow(parameter) else parameter.dtype


def alias_refusal(model: nn.Module, names: Iterable[str]) -> str | None:
    """Why parameters cannot be narrowed one by one; ``None`` where they can.

    Args:
        model: The model.
        names: Their names.

    Returns:
        One clause.
    """
    owners: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owners.setdefault(_memory(tensor), []).append(name)
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = named.get(name)
        if parameter is None:
            return f"the model has no parameter `{name}`"
        if type(parameter) not in _ORDINARY and owner_of(parameter) is None:
            return f"`{name}` is a `{type(parameter).__name__}`"
        others = [it for it in owners[_memory(parameter)] if named.get(it) is not parameter]
        if others:
            return f"`{name}` lies in the same memory as `{others[0]}`"
    return None


def _memory(tensor: Tensor) -> int:
    with without_barrier():  # what is elsewhere stays there
        return int(tensor.untyped_storage()._cdata)


def _convert(parameter: Tensor, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)
