"""Which ops take scratch memory inside that the dispatcher never sees.

Responsible for the list, and for nothing else. It was filled by comparing the profiler's allocator
events inside each op with the op's outputs, over convolutional, recurrent and attention models;
an op that is missing makes predictions too low, one too many costs a probe.
"""

from __future__ import annotations

from functools import cache

_PACKETS = frozenset(
    {
        "_embedding_bag",
        "_safe_softmax",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "_unique2",
        "argsort",
        "convolution",
        "convolution_backward",
        "cumprod",
        "cumsum",
        "embedding_dense_backward",
        "grid_sampler_2d",
        "grid_sampler_2d_backward",
        "gru",
        "index",
        "index_put",
        "index_put_",
        "kthvalue",
        "logcumsumexp",
        "logsumexp",
        "lstm",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "median",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "mode",
        "mse_loss",
        "mse_loss_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "smooth_l1_loss",
        "sort",
        "std",
        "topk",
        "unique_consecutive",
        "var",
        "var_mean",
    }
)

_WITHOUT = frozenset({"linalg_vector_norm"})

_PREFIXES = (
    "_convolution",
    "mkldnn_",
    "slow_conv",
    "thnn_conv",
    "_upsample",
    "upsample",
    "linalg_",
)


@cache
def has_scratch(name: str) -> bool:
    """Whether an op may take memory that is neither an input nor an output of it.

    Args:
        name: Overload name, ``aten.convolution.default``.

    Returns:
        Whether it is worth a probe.
    """
    packet = name.split(".")[1]
    return packet in _PACKETS or (packet.startswith(_PREFIXES) and packet not in _WITHOUT)
