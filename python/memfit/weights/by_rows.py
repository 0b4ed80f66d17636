"""Quantising the weight of a layer a few rows at a time.

Responsible for having torchao quantise slices of a weight and for joining them: each row has a
scale of its own, so the result is the one of the whole weight, bit for bit, and what torchao takes
meanwhile (twice the weight in 32 bits) is that of a slice. Not responsible for which layers are
quantised (:mod:`memfit.weights.load_quantized`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.tensors.heap import trim
from memfit.tensors.storage import is_wrapper

COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Element types in which layers with weights in 8 bits compute."""

_SLICE_BYTES = 1 << 20
_SLICES = 4
"""A slice is no more than a part of its weight, so that what is taken meanwhile stays below it."""

_TRIMMED_EVERY = 8
"""Slices after which the heap is trimmed."""


def require_torchao() -> None:
    """Make sure that there is a torchao.

    Raises:
        UsageError: There is none.
    """
    try:
        import torchao.quantization  # noqa: F401 - it is looked for
    except ImportError:
        raise UsageError(
            "torchao, which quantises, is not installed\nhint: `pip install memfit[quantize]`"
        ) from None


def quantize_by_rows(layer: nn.Linear, weight: Tensor, dtype: torch.dtype) -> bool:
    """Give a linear layer a weight in 8 bits, as ``torchao.quantization.quantize_`` does.

    Args:
        layer: The layer; its bias stays as it is.
        weight: What it shall stand for; it is only read.
        dtype: What the layer computes in.

    Returns:
        Whether torchao quantises such layers; of one that it leaves, the weight is a slice now.
    """
    rows = weight.shape[0]
    row_bytes = max(weight[0].numel() * torch.float32.itemsize, 1)
    step = max(min(_SLICE_BYTES // row_bytes, -(-rows // _SLICES)), 1)
    first = _quantized(layer, weight[:step].to(dtype))
    if first is None:
        return False
    joined = _Joined(first, rows)
    joined.put(0, first)
    shell = nn.Linear(1, 1, bias=False, device="meta")
    for start in range(step, rows, step):
        joined.put(start, _quantized(shell, weight[start : start + step].to(dtype)))
        if start // step % _TRIMMED_EVERY == 0:
            trim()  # what slices leave in the heap lies between what stays
    layer.weight = nn.Parameter(joined.tensor(weight.shape), requires_grad=False)
    return True


def quantize_whole(layer: nn.Linear, weight: Tensor, dtype: torch.dtype) -> bool:
    """The same at once, for weights without values: there are no bytes to save.

    Args:
        layer: As in :func:`quantize_by_rows`.
        weight: Likewise.
        dtype: Likewise.

    Returns:
        Whether torchao quantises such layers.
    """
    return _quantized(layer, weight.to(dtype)) is not None


def _quantized(layer: nn.Linear, weight: Tensor) -> Any:
    """A weight as torchao quantises it in a layer; ``None`` where it leaves the layer."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer.weight = nn.Parameter(weight, requires_grad=False)
    # Its settings for inductor are the process's, and change how products are computed.
    quantize_(nn.ModuleList([layer]), Int8WeightOnlyConfig(set_inductor_config=False))
    vars(layer).pop("extra_repr", None)  # a cycle, which would keep each slice
    return layer.weight if is_wrapper(type(layer.weight)) else None


class _Joined:
    """A quantised weight that is put together from slices of its rows."""

    def __init__(self, first: Any, rows: int) -> None:
        self._kind = type(first)
        names, self._context = first.__tensor_flatten__()
        self._parts: dict[str, Tensor] = {}
        for name in names:
            part = getattr(first, name)
            if part.dim() == 0 or part.shape[0] != first.shape[0]:
                message = f"torchao's `{self._kind.__name__}` has `{name}` that is not by rows"
                raise UsageError(f"{message}\nhint: memfit is tested with torchao 0.18")
            self._parts[name] = torch.empty((rows, *part.shape[1:]), dtype=part.dtype)

    def put(self, start: int, piece: Any) -> None:
        """Take over the rows of a slice."""
        assert piece.__tensor_flatten__()[1] == self._context  # the same settings
        for name, whole in self._parts.items():
            whole[start : start + piece.shape[0]] = getattr(piece, name)

    def tensor(self, shape: torch.Size) -> Tensor:
        """The whole weight."""
        stride = (shape[1], 1)
        whole: Tensor = self._kind.__tensor_unflatten__(self._parts, self._context, shape, stride)
        return whole
