"""The update of one large parameter, slice by slice.

Responsible for running an optimizer's step on slices of a parameter, its gradient and its state,
with the result of the whole step, bit for bit, so that temporaries are those of a slice. Not
responsible for when parameters are updated (:mod:`memfit.apply.optimizer_in_backward`).

Why it is exact: the optimizers named in :func:`~memfit.tensors.optimizers.is_elementwise` compute
each element of parameter and state from the same element of the others. In 32 and 64 bits torch's
kernels give an element the same bits wherever in a tensor it lies; in 16 bits they do not, since
what is left over behind the last whole vector rounds in other places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD

from memfit.tensors.optimizers import is_elementwise
from memfit.tensors.storage import gradient_of, is_wrapper

if TYPE_CHECKING:
    from torch.optim import Optimizer

SLICES = 16
"""Into how many slices a parameter is cut, if they are neither too small nor too large then."""

LEAST_BYTES = 256 << 10
"""Smallest slice on the CPU: calling ops must not matter beside it. AdamW on one core takes 0.8
times as long in slices of 1 MiB as whole, since they stay in its cache, and 1.1 in these."""

MOST_BYTES = 1 << 20
"""Largest slice on the CPU: what stays in the cache of one core."""

_LEAST_BYTES_ON_GPU = 8 << 20
_MOST_BYTES_ON_GPU = 64 << 20

_OF_CPU = ("cpu", "meta")
"""Tensors of the meta device are twins of the CPU's here; those of a GPU's are fakes."""

_DTYPES = (torch.float32, torch.float64)

State = dict[str, Any]


def slices_of(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """In how many slices a parameter can be updated; 1 where it has to be, or is better, whole.

    Args:
        optimizer: Its optimizer.
        group: The group that lists it.
        parameter: The parameter, with its gradient.
    """
    if parameter.grad is None or _takes_nothing(optimizer, group):
        return 1
    count = _slices(optimizer, group, parameter)
    if count == 1:
        return 1
    state = _alike(optimizer.state.get(parameter, {}), parameter)
    return count if all(_lies_like(value, parameter) for _, value in state) else 1


def state_slices(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    """In how many slices a parameter is updated whose state is elsewhere, and not looked at.

    Args:
        optimizer: Its optimizer.
        group: The group that lists it.
        parameter: The parameter, perhaps with its gradient; slices are those of the CPU.
    """
    return _slices(optimizer, group, parameter) if parameter.device.type in _OF_CPU else 1


def _slices(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    """In how many slices a parameter can be updated, as far as its state does not matter."""
    size_bytes = parameter.numel() * parameter.itemsize
    is_of_cpu = parameter.device.type in _OF_CPU
    least = LEAST_BYTES if is_of_cpu else _LEAST_BYTES_ON_GPU
    if size_bytes < 2 * least:
        return 1  # first: it is so of most parameters, and asked in every step
    asks = ("fused", "capturable", "differentiable")
    if not is_elementwise(optimizer) or any(group.get(key) for key in asks):
        return 1
    gradient = gradient_of(parameter)  # nobody uses it here
    if not _lies_like(parameter, parameter) or not (
        gradient is None or _lies_like(gradient, parameter)
    ):
        return 1
    most = MOST_BYTES if is_of_cpu else _MOST_BYTES_ON_GPU
    return max(size_bytes // min(max(size_bytes // SLICES, least), most), 1)


def _takes_nothing(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an update has no temporaries to spare: plain SGD writes in place alone."""
    asks = ("weight_decay", "nesterov", "maximize")
    return type(optimizer) is SGD and not any(group.get(key) for key in asks)


def update_in_slices(
    optimizer: Optimizer,
    parameter: Tensor,
    count: int,
    step: Callable[[list[Tensor]], None],
    *,
    most: int | None = None,
) -> int:
    """Update a parameter in slices.

    Args:
        optimizer: Its optimizer; its state is as after a whole step.
        parameter: The parameter, with its gradient.
        count: In how many slices, more than 1.
        step: Runs the optimizer's step over a list of parameters.
        most: How many slices to update; all by default. On fakes one tells what the others take.

    Returns:
        How many elements were updated.
    """
    state = optimizer.state
    stop = 0
    held: State = dict(state.get(parameter, {}))
    after: State = {}
    for start, stop in islice(bounds(parameter.numel(), count), most):
        part = flat(parameter, start, stop)
        assert parameter.grad is not None, "it has slices"
        part.grad = flat(parameter.grad, start, stop)
        if held:
            state[part] = {key: _part_of(held[key], parameter, start, stop) for key in held}
        try:
            step([part])
        finally:
            made = state.pop(part, {})
        for key, value in made.items():
            if not is_alike(value, part):
                after[key] = value  # a count of steps, the same in all slices
                continue
            whole = held.get(key)
            whole = after.get(key) if whole is None else whole
            if whole is None:
                whole = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            _write(whole, value, start, stop)
            after[key] = whole
    _take_over(state, parameter, held, after)
    return stop


def _take_over(state: Any, parameter: Tensor, held: State, after: State) -> None:
    """Let the state be what the slices made of it; its tensors stay the same objects."""
    if not held:
        if after:
            state[parameter] = after
        return
    own = state[parameter]
    for key, value in after.items():
        before = held.get(key)
        if isinstance(before, Tensor) and isinstance(value, Tensor):
            if before is not value:
                before.copy_(value)
        else:
            own[key] = value


def _part_of(value: Any, parameter: Tensor, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return flat(value, start, stop) if is_alike(value, parameter) else value.clone()


def _write(whole: Tensor, part: Tensor, start: int, stop: int) -> None:
    target = flat(whole, start, stop)
    is_in_place = target.untyped_storage()._cdata == part.untyped_storage()._cdata
    if not is_in_place:
        target.copy_(part)


def _alike(state: Any, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Tensors of the state with an element for each of the parameter's."""
    return [(key, value) for key, value in dict(state).items() if is_alike(value, parameter)]


def is_alike(value: Any, parameter: Tensor) -> bool:
    """Whether a value of the state has an element for each of the parameter's.

    Args:
        value: The value.
        parameter: The parameter, or a slice of it.
    """
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _lies_like(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor is dense, in the parameter's order, and of a type that may be cut."""
    if tensor.layout is not torch.strided or is_wrapper(type(tensor)):
        return False
    dense = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (
        tensor.dtype in _DTYPES
        and tensor.dtype is parameter.dtype
        and tensor.device == parameter.device
        and tensor.shape == parameter.shape
        and tensor.stride() == parameter.stride()
        and dense == tensor.numel()
    )


def flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Elements of a dense tensor in the order in which they lie in memory.

    Args:
        tensor: The tensor.
        start: The first.
        stop: One past the last.
    """
    return tensor.detach().as_strided((stop - start,), (1,), tensor.storage_offset() + start)


def bounds(elements: int, count: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each slice.

    Args:
        elements: Of the whole.
        count: In how many slices.
    """
    size = -(-elements // count)
    for start in range(0, elements, size):
        yield start, min(start + size, elements)
