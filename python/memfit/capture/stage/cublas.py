"""What cuBLAS keeps of a GPU's memory.

Responsible for the bytes of its workspaces, by the rules of torch: nothing tells them before they
are taken. Not responsible for scratch inside single ops.

A thread that multiplies matrices gets a handle with a workspace out of torch's caching allocator,
which lives as long as the process: one for the thread of the forward, one for that of autograd
(``aten/src/ATen/cuda/CublasHandlePool.cpp``). cuBLASLt, which adds a bias on the way, takes one of
its own in the forward (``aten/src/ATen/cuda/CUDABlas.cpp``). On an H200 with torch 2.11 that made
64 MiB, and 65 MiB with a bias.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import torch

from memfit.weights.absent_gpu import is_pretended

NAME = "cuBLAS workspaces"

_PRODUCTS = frozenset({"aten.addmm.default", "aten.baddbmm.default", "aten.bmm.default"}) | {
    "aten.mm.default"
}
_BIASED = "aten.addmm.default"
_KIB = 1 << 10
_DEFAULT = 2 * 4096 * _KIB + 8 * 16 * _KIB
_SINCE_HOPPER = 8 * 4096 * _KIB
_HOPPER = 9
"""Compute capability from which the larger default holds."""
_BIAS_DEFAULT = 1024 * _KIB


def workspace_bytes(ops: Iterable[str], *, training: bool) -> int:
    """Bytes that the workspaces of a step take; 0 where no GPU is here to take them.

    Args:
        ops: Names of the ops that the step runs.
        training: Whether it has a backward, which autograd runs in a thread of its own.
    """
    names = _PRODUCTS.intersection(ops)
    if not names or is_pretended():
        return 0
    threads = 2 if training else 1
    return threads * _of_a_handle() + (_of_a_bias() if _BIASED in names else 0)


def _of_a_handle() -> int:
    """What ``CUBLAS_WORKSPACE_CONFIG`` says (``:KiB:count`` once or more often), or the default."""
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if said:
        return sum(int(size) * int(count) for size, count in said) * _KIB
    major, _ = torch.cuda.get_device_capability()
    return _SINCE_HOPPER if major >= _HOPPER else _DEFAULT


def _of_a_bias() -> int:
    said = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(said) * _KIB if said.isdigit() else _BIAS_DEFAULT
