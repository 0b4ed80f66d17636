"""A copy of a workload's model, and of its optimizer, without some channels.

Responsible for copying: what is tied stays tied, what goes is never copied, and the user's model
and optimizer stay as they are. Not responsible for the numbers that modules note of their sizes
(:mod:`memfit.prune.sizes`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.prune.groups import Kept, cut_shape, tensors_of
from memfit.workload import Workload

Dimensions = Mapping[int, Tensor]
"""For dimensions, the indices that are left."""


def cut(workload: Workload, left: Kept, fakes: FakeTensorMode | None = None) -> Workload:
    """Copy a workload, its model without what goes.

    Args:
        workload: The workload; it stays as it is.
        left: What is left of parameters and buffers, by name.
        fakes: Makes the copy's parameters fakes, so that it takes no memory; buffers are real.

    Returns:
        The same step of the copy. An optimizer that was given as one is copied along, with its
        state cut as its parameters are; gradients are not.

    Raises:
        UsageError: The model cannot be copied; or the optimizer has state of another shape than
            its parameter's.
    """
    given = workload.optimizer if isinstance(workload.optimizer, Optimizer) else None
    memo = _Copies(workload.model, left, fakes)
    if given is not None:
        memo.add_state(given)
    try:
        model, optimizer = copy.deepcopy((workload.model, given), memo.memo)
    except Exception as error:
        message = f"the model cannot be copied ({type(error).__name__}: {error})"
        raise UsageError(message) from error
    for parameter in model.parameters():
        parameter.grad = None
    return replace(workload, model=model, optimizer=optimizer or workload.optimizer)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the copy of one tensor."""

    fakes: FakeTensorMode | None

    def __call__(self, tensor: Tensor, dimensions: Dimensions) -> Tensor:
        if self.fakes is not None:
            shape = cut_shape(tensor.shape, dimensions)
            with self.fakes:
                return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return sliced(tensor.detach(), dimensions)


class _Copies:
    """What ``copy.deepcopy`` is to take for tensors that it comes to, by their ids."""

    def __init__(self, model: nn.Module, left: Kept, fakes: FakeTensorMode | None) -> None:
        self.memo: dict[int, Any] = {}
        tensors = tensors_of(model)
        self._dimensions = {id(tensors[name]): dimensions for name, dimensions in left.items()}
        make = _Maker(fakes)
        self._make: Callable[[Tensor, Dimensions], Tensor] = make
        for name, tensor in tensors.items():
            dimensions = self._dimensions.get(id(tensor), {})
            if not isinstance(tensor, nn.Parameter):
                if dimensions:
                    self.memo[id(tensor)] = sliced(tensor, left.get(name, dimensions))
            elif (dimensions or fakes is not None) and id(tensor) not in self.memo:
                parameter = nn.Parameter(make(tensor, dimensions), tensor.requires_grad)
                vars(parameter).update(vars(tensor))
                self.memo[id(tensor)] = parameter
        self._is_fake = fakes is not None

    def add_state(self, optimizer: Optimizer) -> None:
        """Take in the state of an optimizer.

        Raises:
            UsageError: It has state of another shape than its parameter's, which is cut.
        """
        for parameter, state in optimizer.state.items():
            dimensions = self._dimensions.get(id(parameter), {})
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.numel() <= 1:
                    continue
                if value.shape == parameter.shape:
                    if dimensions or self._is_fake:
                        self.memo[id(value)] = self._make(value, dimensions)
                elif dimensions:
                    message = (
                        f"`{type(optimizer).__name__}` has state `{name}` of the shape "
                        f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}, which "
                        "cannot be cut: give a function that makes the optimizer"
                    )
                    raise UsageError(message)


def sliced(tensor: Tensor, dimensions: Dimensions) -> Tensor:
    """The indices of a tensor that are left, in memory of their own and in the same layout.

    Args:
        tensor: The tensor.
        dimensions: For dimensions, the indices that are left.
    """
    cut_tensor = tensor
    for dimension, indices in dimensions.items():
        cut_tensor = cut_tensor.index_select(dimension, indices.to(tensor.device))
    if not tensor.is_contiguous() and suggest_memory_format(tensor) is torch.channels_last:
        return cut_tensor.contiguous(memory_format=torch.channels_last)
    return cut_tensor


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each once.

    Args:
        tensors: Parameters or buffers.
    """
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
