"""What a call is given and what it returns, flattened.

Responsible for finding the tensors among nested arguments and results, and for showing the other
arguments as text. Not responsible for what a call means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.tensors.operators import Operator
from memfit.tensors.storage import plain_tensors


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Every tensor among the arguments of a call, in argument order; of sparse ones the parts."""
    return _strided(_given(args, kwargs))


def are_strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no argument is sparse: an executor can give all of them again."""
    tensors = _given(args, kwargs)
    return _strided(tensors) is tensors


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for argument in args:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors.extend(item for item in argument if isinstance(item, Tensor))
    for argument in kwargs.values():
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors.extend(item for item in argument if isinstance(item, Tensor))
    return tensors


def _strided(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return [part for one in tensors for part in plain_tensors(one)]
    return tensors


def written_tensors(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Every tensor that a call writes to in place, in argument order.

    Without sparse ones: they have other parts afterwards, which the call returns.
    """
    tensors: list[Tensor] = []
    for place in operator.written:
        if isinstance(place, int):
            name = operator.argument_names[place]
            argument = args[place] if place < len(args) else kwargs.get(name)
        else:
            argument = kwargs.get(place)
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors.extend(item for item in argument if isinstance(item, Tensor))
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def returned_tensors(out: Any) -> list[Tensor]:
    """Every tensor that a call returned, in order; of sparse ones the parts."""
    if isinstance(out, Tensor):
        return _strided([out])
    tensors: list[Tensor] = []
    if isinstance(out, (list, tuple)):
        for item in out:
            tensors.extend(returned_tensors(item))
    return tensors


_MEMORY = (Tensor, torch.UntypedStorage, torch.TypedStorage)
"""A storage would be written as all of its bytes: cuDNN's LSTM hands one to ``set_``."""


def arguments_text(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Arguments that are neither memory nor at their default, as ``dim=-1, keepdim=True``."""
    parts: list[str] = []
    defaults = operator.keyword_defaults
    names = operator.argument_names
    for position, argument in enumerate(args):
        if argument is None or isinstance(argument, _MEMORY):
            continue
        if isinstance(argument, (list, tuple)) and any(isinstance(i, Tensor) for i in argument):
            continue
        name = names[position]
        if name in defaults and argument == defaults[name]:
            continue
        parts.append(f"{name}={_text(argument)}")
    for name, argument in kwargs.items():
        if argument is None or isinstance(argument, (Tensor, torch.Generator)):
            continue
        if name in defaults and argument == defaults[name]:
            continue
        parts.append(f"{name}={_text(argument)}")
    return ", ".join(parts)


def _text(argument: Any) -> str:
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    if isinstance(argument, float):
        return f"{argument:g}"
    return str(argument).replace(" ", "")
