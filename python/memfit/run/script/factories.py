"""How much memory a call of one of torch's factory functions is about to take.

Responsible for what models and their copies are made by: ``empty``, ``randn``, ``clone`` and the
like, on the CPU; and for writing to what is in a mapped file, as when a model is initialised or a
checkpoint is read, which makes memory of its pages. Not responsible for what is done where there is
no room (:mod:`memfit.run.script.between_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.tensors.storage import is_private_mapping
from memfit.track.owners import storage_of

LEAST_BYTES = 1 << 20
"""Smaller ones are not looked at."""

_OF_SIZES = frozenset({torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros})
"""Called with sizes, as one argument or as many."""

_ALIKE = frozenset({torch.clone, torch.empty_like, torch.ones_like, torch.zeros_like, Tensor.clone})
"""Called with a tensor as large as the one that they make."""


def about_to_take(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that a call takes from the CPU's memory; 0 for little, and for other functions.

    Args:
        function: As ``__torch_function__`` is told.
        args: What it is called with.
        kwargs: Likewise.
    """
    if function in _OF_SIZES:
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size = _elements(kwargs.get("size", args)) * dtype.itemsize
        return size if size >= LEAST_BYTES and _is_on_cpu(kwargs.get("device")) else 0
    if function in _ALIKE:
        like = args[0] if args else kwargs.get("input")
        if isinstance(like, Tensor) and like.layout is torch.strided and like.is_cpu:
            return like.nbytes if like.nbytes >= LEAST_BYTES and not kwargs.get("device") else 0
    written = args[0] if args else kwargs.get("tensor")  # as functions of `nn.init` are told
    if isinstance(written, Tensor) and _writes(getattr(function, "__name__", "")):
        storage = storage_of(written) if written.nbytes >= LEAST_BYTES else None
        return written.nbytes if storage is not None and is_private_mapping(storage) else 0
    return 0


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument, as its name says."""
    return name.endswith("_") and not name.endswith("__")


def _elements(sizes: Any) -> int:
    """How many elements sizes come to; 0 of what is none."""
    first = sizes[0] if sizes else None
    numbers = first if isinstance(first, (list, tuple)) else sizes
    return math.prod(it for it in numbers if isinstance(it, int))


def _is_on_cpu(device: Any) -> bool:
    return torch.device(torch.get_default_device() if device is None else device).type == "cpu"
