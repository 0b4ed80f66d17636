"""Tensors that a transform of ``torch.func`` is given.

Responsible for having their class asked first, as before any function of torch: a transform wraps
them in C++, which asks no ``__torch_function__``, and what is computed with the wrapper goes by
their class too. Not responsible for what a class answers (:mod:`memfit.tensors.barrier`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

_WRAPPING = {
    "torch._functorch.eager_transforms": ("_wrap_for_grad", "_wrap_functional_tensor"),
    "torch._functorch.vmap": ("_add_batch_dim",),
}
"""Where transforms wrap what they are given, the same since before torch 2.10."""


@cache
def ask_classes(mark: str) -> None:
    """Have transforms ask the classes that have an attribute of this name, from now on.

    Args:
        mark: Of other classes, torch's own among them, nothing changes.
    """

    def asking(wrap: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wrap)
        def wrap_asked(tensor: Any, *levels: Any) -> Any:
            if hasattr(type(tensor), mark) and has_torch_function((tensor,)):
                return handle_torch_function(wrap, (tensor,), tensor, *levels)
            return wrap(tensor, *levels)

        return wrap_asked

    for place, names in _WRAPPING.items():
        module = importlib.import_module(place)
        for name in names:
            if hasattr(module, name):
                setattr(module, name, asking(getattr(module, name)))
