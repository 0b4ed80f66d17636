"""Which calls of ops take scratch memory inside that the dispatcher never sees.

Responsible for the lists, and for nothing else. They were filled by comparing the profiler's
allocator events inside each op with the op's outputs, over convolutional, recurrent and attention
models and over the samples of torch's own operator tests (``torch.testing._internal``'s
``op_db``), forward and backward. A call that is missing makes predictions too low, one too many
costs a probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PACKETS = frozenset(
    {
        "_adaptive_avg_pool3d_backward",
        "_addmm_activation",
        "_cdist_backward",
        "_cdist_forward",
        "_chunk_cat",
        "_ctc_loss",
        "_ctc_loss_backward",
        "_embedding_bag",
        "_embedding_bag_backward",
        "_embedding_bag_per_sample_weights_backward",
        "_euclidean_dist",
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_native_multi_head_attention",
        "_safe_softmax",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "_transformer_encoder_layer_fwd",
        "_trilinear",
        "_unique",
        "_unique2",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "argsort",
        "binary_cross_entropy_with_logits",
        "convolution",
        "convolution_backward",
        "cumprod",
        "cumsum",
        "dist",
        "embedding_dense_backward",
        "grid_sampler_2d",
        "grid_sampler_2d_backward",
        "gru",
        "histc",
        "huber_loss",
        "index",
        "index_put",
        "index_put_",
        "index_reduce",
        "isin",
        "isinf",
        "kthvalue",
        "logcumsumexp",
        "logsumexp",
        "lstm",
        "masked_select",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "median",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "mode",
        "mse_loss",
        "mse_loss_backward",
        "multinomial",
        "mvlgamma",
        "nanmedian",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_dropout",
        "native_dropout_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "roll",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "smooth_l1_loss",
        "soft_margin_loss",
        "soft_margin_loss_backward",
        "sort",
        "std",
        "topk",
        "unique_consecutive",
        "var",
        "var_mean",
    }
)

_PREFIXES = (
    "_convolution",
    "_linalg_",
    "_upsample",
    "linalg_",
    "mkldnn_",
    "slow_conv",
    "thnn_conv",
    "upsample",
)

_ONE_TYPE = frozenset(
    {
        "add",
        "addcdiv",
        "addcmul",
        "atan2",
        "cat",
        "clamp",
        "div",
        "eq",
        "fmod",
        "ge",
        "gt",
        "hypot",
        "le",
        "lerp",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "pow",
        "remainder",
        "rsub",
        "stack",
        "sub",
        "where",
        "xlogy",
    }
)
"""Elementwise: operands of another type than they compute in are converted first."""

_DIVISIONS = frozenset({"atan2", "div", "xlogy"})
"""Of those, what computes in floats always."""

_REDUCTIONS = frozenset(
    {"all", "any", "linalg_vector_norm", "mean", "nansum", "norm", "prod", "sum"}
)
"""Convert what they reduce: floats below 32 bits, integers, and where another type is asked for."""

_MATRIX_PRODUCTS = frozenset({"addbmm", "addmm", "addmv", "baddbmm", "bmm", "mm", "mv"})
"""Copy a matrix that lies neither by rows nor by columns, and pack what oneDNN multiplies.

oneDNN multiplies floats of 16 bits where the processor knows them, and those of 32 where they may
be rounded (``aten/src/ATen/native/mkldnn/Matmul.cpp``). A processor without tiles of its own packs
the matrices first and sums in 32 bits beside the result. One that does not know them takes nothing
beside the result, and up to forty times as long: a probe of GPT-2's logits would take minutes.
"""

_UNROUNDED = frozenset({"ieee", "none"})
"""Settings of ``torch.backends.mkldnn.matmul.fp32_precision`` that leave floats of 32 bits alone;
``torch.set_float32_matmul_precision`` sets it too."""

_DENSE = frozenset(
    {
        "_adaptive_avg_pool2d_backward",
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward",
        "avg_pool2d_backward",
        "avg_pool3d_backward",
        "channel_shuffle",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
        "gelu_backward",
        "index_select",
        "masked_scatter",
        "masked_scatter_backward",
        "max_pool3d_with_indices_backward",
        "pixel_shuffle",
        "pixel_unshuffle",
        "reflection_pad1d_backward",
        "reflection_pad2d_backward",
        "replication_pad1d_backward",
        "replication_pad2d_backward",
        "tril",
        "triu",
    }
)
"""Copy what is not contiguous, such as the expanded gradient of a sum."""


def takes_scratch(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may take memory that is neither an input nor an output of it.

    Args:
        name: Overload name, ``aten.convolution.default``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments.

    Returns:
        Whether it is worth a probe.
    """
    plain, may = _known(name)
    if may is not None:
        return may
    operands = args[1:] if plain == "where" else args
    tensors = _tensors(operands)
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False  # of those, nothing is counted
    if plain in _REDUCTIONS:
        return _converts(tensors, kwargs)
    if plain in _ONE_TYPE:
        return _mixes_types(tensors, operands, divides=plain in _DIVISIONS)
    if plain in _MATRIX_PRODUCTS:
        ordered = all(_is_by_rows_or_columns(tensor) for tensor in tensors)
        return not ordered or _may_be_packed(tensors)
    return plain in _DENSE and not all(tensor.is_contiguous() for tensor in tensors)


@cache
def _known(name: str) -> tuple[str, bool | None]:
    """An op without overload and mark of writing in place; whether all of its calls do, or none."""
    packet = name.split(".")[1]
    plain = packet.removesuffix("_")
    if (packet in _PACKETS or packet.startswith(_PREFIXES)) and packet not in _REDUCTIONS:
        return plain, True
    depends = (_REDUCTIONS, _ONE_TYPE, _MATRIX_PRODUCTS, _DENSE)
    return plain, None if any(plain in listed for listed in depends) else False


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors of at least one dimension, those in lists included; a number takes no memory."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dim() > 0:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _converts(tensors: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
    types = {tensor.dtype for tensor in tensors}
    return kwargs.get("dtype") is not None or not types <= {torch.float32, torch.float64}


def _mixes_types(tensors: list[Tensor], operands: tuple[Any, ...], *, divides: bool) -> bool:
    """Whether operands differ in type, or are integers beside a float or to be divided."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        return True
    is_float = any(kind.is_floating_point or kind.is_complex for kind in types)
    by_float = any(isinstance(value, float) or _is_float_number(value) for value in operands)
    return bool(types) and not is_float and (divides or by_float)


def _may_be_packed(tensors: list[Tensor]) -> bool:
    types = {tensor.dtype for tensor in tensors}
    onednn: Any = torch.backends.mkldnn  # a module in name alone: types do not know its parts
    rounded = onednn.matmul.fp32_precision not in _UNROUNDED
    return not types.isdisjoint(_short_floats()) or (rounded and torch.float32 in types)


@cache
def _short_floats() -> frozenset[torch.dtype]:
    """Floats of 16 bits that oneDNN multiplies on this processor."""
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return frozenset()
    known = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(short for short, is_known in known.items() if is_known())


def _is_float_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _is_by_rows_or_columns(tensor: Tensor) -> bool:
    if tensor.dim() < 2:  # noqa: PLR2004 - a bias, or a vector
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = column == 1 and row >= max(columns, 1)
    by_columns = row == 1 and column >= max(rows, 1)
    return by_rows or by_columns or 1 in (rows, columns)
