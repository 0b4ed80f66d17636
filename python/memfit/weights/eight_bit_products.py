"""Layers with weights in 8 bits that multiply in 8 bits too.

Responsible for having torchao quantise what such a layer is given, row by row at each use
(``Int8DynamicActivationInt8WeightConfig``), for which weights it has products for, and for whether
the processor adds them up right. Not responsible for the weights, which are the same in both forms
(:mod:`memfit.weights.by_rows`), nor for when (:mod:`memfit.weights.in_eight_bits`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import UsageError

_MULTIPLE = 8
"""Numbers that rows and columns of a product on a GPU come in (cuBLAS)."""
LEAST_ROWS = 17
"""Rows of the first operand of a product on a GPU, at least (``torch._int_mm``)."""

_CHECKED_ROWS, _CHECKED_COLUMNS = 32, 256


def set_products(weight: Any, *, in_eight_bits: bool) -> None:
    """Have a layer multiply in 8 bits or in the type of what it is given.

    Args:
        weight: Its weight, quantised; the numbers in it stay as they are.
        in_eight_bits: Which of the two.
    """
    weight.act_quant_kwargs = _settings() if in_eight_bits else None


def products_refusal(shape: torch.Size, device: str) -> str:
    """Why a weight has no products in 8 bits, as a clause; empty where it has.

    Args:
        shape: Of the weight.
        device: The kind of device.
    """
    if device == "cpu" or all(side % _MULTIPLE == 0 for side in shape):
        return ""
    sides = " x ".join(map(str, shape))
    return f"it is {sides}, and products in 8 bits on a GPU take sides in multiples of {_MULTIPLE}"


def require_products(device: str) -> None:
    """Make sure that products in 8 bits are right.

    Args:
        device: The kind of device.

    Raises:
        UsageError: This processor rounds their sums, or cuts them off.
    """
    if device == "cpu" and not _are_right_here():
        raise UsageError(
            "products in 8 bits are wrong on this processor, which has no instruction that adds "
            "them up in 32 bits (VNNI)\nhint: `int8_weights` multiplies in the type of the step"
        )


@cache
def _settings() -> Any:
    """How torchao quantises what a layer is given, as it notes it on a weight."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    with _disable_current_modes():
        layer = nn.Linear(_MULTIPLE, _MULTIPLE, bias=False)
        config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        quantize_(nn.ModuleList([layer]), config)
    settings = getattr(layer.weight, "act_quant_kwargs", None)
    if settings is None:
        raise UsageError(
            f"torchao's `{type(layer.weight).__name__}` does not say how inputs are quantised\n"
            "hint: memfit is tested with torchao 0.18"
        )
    return settings


@cache
def _are_right_here() -> bool:
    """Whether a product of the largest numbers there are is the one in 64 bits.

    Two products of 8 bits do not fit in the 16 in which older processors add up pairs.
    """
    from torchao.quantization import Int8Tensor, PerRow

    # Of tensors alone: modules may be built without weights around this.
    with _disable_current_modes(), torch.no_grad():
        far = torch.linspace(-1.0, 1.0, _CHECKED_COLUMNS).sign()
        rows = torch.stack([far, -far, far.abs(), -far.abs()]).repeat(_CHECKED_ROWS // 4, 1)
        left, right = (Int8Tensor.from_hp(rows, granularity=PerRow()) for _ in range(2))
        expected = left.dequantize().double() @ right.dequantize().double().t()
        set_products(right, in_eight_bits=True)
        found = functional.linear(rows, right).double()
        return bool(torch.allclose(found, expected, rtol=1e-5, atol=1e-4))
