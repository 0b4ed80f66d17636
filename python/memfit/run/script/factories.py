"""How much memory a call of one of torch's functions is about to take.

Responsible for what models and their copies are made by: ``empty``, ``randn``, ``clone`` and the
like, on the CPU; for what weights are looked at by once they are trained: ``double``, ``abs``,
``square``; and for writing to what is in a mapped file, as when a model is initialised or a
checkpoint is read, which makes memory of its pages. Not responsible for what is done where there is
no room (:mod:`memfit.run.script.between_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memfit.run.script.shared_memory import is_in_mapped_file

LEAST_BYTES = 1 << 20
"""Smaller ones are not looked at."""

_OF_SIZES = frozenset({torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros})
"""Called with sizes, as one argument or as many."""

_NEW = frozenset({Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros})
"""Called with sizes, too, of a tensor that has the type."""

_ALIKE = frozenset(
    {
        *(torch.abs, torch.clone, torch.empty_like, torch.ones_like, torch.pow, torch.square),
        *(torch.zeros_like, Tensor.__pow__, Tensor.abs, Tensor.clone, Tensor.pow, Tensor.square),
    }
)
"""Called with a tensor as large as the one that they make."""

_DECOMPOSITIONS = {torch.linalg.qr: 3, torch.linalg.svd: 4}
"""Called with a matrix, of which they take so many times the bytes at most, unless the factors are
larger: LAPACK works on copies. Weights are made orthogonal so."""

_CONVERSIONS = {
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
}
"""The types that they make, where a tensor has another one."""

_KINDS = (Tensor, nn.Parameter, nn.Buffer)


def about_to_take(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that a call takes from the CPU's memory; 0 for little, and for other functions.

    Args:
        function: As ``__torch_function__`` is told.
        args: What it is called with.
        kwargs: Likewise.
    """
    if function in _OF_SIZES or function in _NEW:
        of, sizes = (args[0], args[1:]) if function in _NEW else (None, args)
        dtype, device = (kwargs.get(name, getattr(of, name, None)) for name in ("dtype", "device"))
        size = _elements(kwargs.get("size", sizes)) * _element_bytes(dtype)
        return size if size >= LEAST_BYTES and _is_on_cpu(device) else 0
    name = getattr(function, "__name__", "")
    becomes = _CONVERSIONS.get(function)
    times = _DECOMPOSITIONS.get(function, 1 if function in _ALIKE else 0)
    if becomes is None and not times and not _writes(name):
        return 0
    tensor: Any = args[0] if args else kwargs.get("tensor", kwargs.get("input", kwargs.get("A")))
    if type(tensor) not in _KINDS or tensor.device.type != "cpu":
        return 0  # a class of its own may refuse anything
    size = tensor.nbytes if tensor.layout is torch.strided else 0
    if becomes is not None:
        made = size // tensor.itemsize * becomes.itemsize if tensor.dtype is not becomes else 0
        return made if made >= LEAST_BYTES else 0
    if size < LEAST_BYTES or (function in _ALIKE and kwargs.get("device") is not None):
        return 0
    return times * size if times else size if is_in_mapped_file(tensor) else 0


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument, as its name says."""
    return name.endswith("_") and not name.endswith("__")


def _elements(sizes: Any) -> int:
    """How many elements sizes come to, as far as they are numbers; 0 of what are none."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return 0
    numbers = sizes[0] if isinstance(sizes[0], (list, tuple)) else sizes
    return math.prod(it for it in numbers if isinstance(it, int))


def _element_bytes(dtype: Any) -> int:
    """Bytes of an element; a type of Python's stands for one of 8 bytes at most."""
    if dtype is None:
        return torch.get_default_dtype().itemsize
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 8


def _is_on_cpu(device: Any) -> bool:
    return torch.device(torch.get_default_device() if device is None else device).type == "cpu"
