"""Whether a convolution's gradients are the same bits in two calls as in one.

Torch has a kernel for each gradient, and chooses among them by what it is given, not by which
gradients are asked for. Responsible for trying that once for each kind of convolution, on a small
one, and for taking none for granted of which that was not seen. Not responsible for the two calls
(:mod:`memfit.tensors.convolution_in_two`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.tensors.shape_saves import blank_like

BACKWARD = torch.ops.aten.convolution_backward.default

_FORWARD = torch.ops.aten.convolution.default
_FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}
"""By dimensions of a batch: the other order that it may lie in."""

_BACKENDS = frozenset(
    (
        "Mkldnn",
        "MkldnnTranspose",
        "Slow2d",
        "Slow3d",
        "SlowDilated2d",
        "SlowDilated3d",
        "SlowTranspose2d",
        "SlowTranspose3d",
    )
)
"""Those on the CPU with a kernel of its own for each gradient, which is called or not as the mask
of outputs says (``convolution_backward`` in ``ATen/native/Convolution.cpp``)."""


def gives_the_same(args: tuple[Any, ...]) -> bool:
    """Whether two calls were seen to give the bits of one, for a small convolution of its kind.

    Args:
        args: Arguments of its backward, with plain tensors.
    """
    batch, weight, of_bias, *settings, mask = args[1:]
    order, of_weight = _order(batch), _order(weight)
    if order is None or of_weight is None:
        return False
    *sizes, transposed, output_padding, groups = settings
    return _is_proved(
        _backend(batch, weight, of_bias, settings),
        batch.dtype,
        (order, of_weight),
        tuple(weight.shape),
        tuple(map(tuple, (*sizes, output_padding))),
        (transposed, groups, mask[2]),
    )


def _backend(batch: Tensor, weight: Tensor, of_bias: Any, settings: Sequence[Any]) -> str:
    """The name of the kernels that torch takes in backward; empty where it does not say."""
    select: Callable[..., Any] = torch._C._select_conv_backend
    with torch._C._DisableTorchDispatch(), torch.enable_grad():  # without it, of forward alone
        try:
            wanted = weight.detach().requires_grad_()
            found = select(batch, wanted, None, *settings, of_bias)
        except RuntimeError:  # as of an empty batch
            return ""
    kinds = type(found)
    is_next = int(found) == int(kinds.Mkldnn) + 1  # in C++ alone it has a name
    is_named = str(found.name) in kinds.__members__
    return "MkldnnTranspose" if is_next and not is_named else str(found.name)


def _order(tensor: Tensor) -> torch.memory_format | None:
    """In which of two orders a tensor lies."""
    for order in (torch.contiguous_format, _FORMATS.get(tensor.dim())):
        if order is not None and tensor.is_contiguous(memory_format=order):
            return order
    return None


_MOST = 3
"""Groups, and channels of each, of the convolution that is tried."""


@cache
def _is_proved(
    backend: str,
    dtype: torch.dtype,
    orders: tuple[torch.memory_format, torch.memory_format],
    weights: tuple[int, ...],
    sizes: tuple[tuple[int, ...], ...],
    others: tuple[bool, int, bool],
) -> bool:
    if backend not in _BACKENDS:
        return False
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return _is_seen(backend, dtype, orders, weights, sizes, others)
    except RuntimeError:  # there is none so small
        return False


def _is_seen(
    backend: str, dtype: torch.dtype, orders: Any, weights: Any, sizes: Any, others: Any
) -> bool:
    (stride, padding, dilation, output_padding), (transposed, groups, has_bias) = sizes, others
    few = min(groups, _MOST)
    first, second = (min(it, _MOST) for it in (weights[0] // groups, weights[1]))
    kernel = weights[2:]
    reach = zip(kernel, dilation, stride, padding, strict=True)
    space = [1 + 2 * pad if transposed else d * (k - 1) + 1 + 2 * s for k, d, s, pad in reach]
    settings = (*map(list, (stride, padding, dilation)), transposed, list(output_padding), few)
    batch = _numbers((2, few * (first if transposed else second), *space), dtype, orders[0])
    weight = _numbers((few * first, second, *kernel), dtype, orders[1])
    made = _FORWARD(batch, weight, None, *settings)
    gradient = _numbers(tuple(made.shape), dtype, orders[0])
    rest = (weight, [made.shape[1] if has_bias else 0], *settings)
    if _backend(batch, weight, rest[1], settings) != backend:
        return False
    one = BACKWARD(gradient, batch, *rest, [True, True, has_bias])
    of_weights = BACKWARD(gradient, batch, *rest, [False, True, has_bias])
    of_input = BACKWARD(gradient, blank_like(batch), *rest, [True, False, False])
    return all(map(_same_bits, one, (of_input[0], *of_weights[1:])))


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, order: torch.memory_format) -> Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float64, device="cpu").sin().to(dtype).view(shape)
    return numbers.contiguous(memory_format=order)


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.stride() == other.stride() and torch.equal(one.view(kind), other.view(kind))
