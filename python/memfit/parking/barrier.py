"""A barrier before the tensors of a parked model.

Responsible for an error, named, wherever Python or an op of torch touches such a tensor: forward,
an optimizer's step, ``print``, ``state_dict``. Not responsible for code that reaches the bytes in
another way (a pointer kept from before): there is no page behind the address, so it ends in a
fault of the process, never in wrong numbers.

A tensor's class is exchanged for one that answers ``__torch_function__``. The object, its gradient
and its hooks stay; putting the class back takes the barrier away, and until then it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit.errors import ParkError


class Barrier:
    """Can be put before the tensors of one model."""

    def __init__(self, tensors: Mapping[str, Tensor], owner: object) -> None:
        """Create it, taken down.

        Args:
            tensors: The tensors by name.
            owner: Who can take it down; lives as long as it is up.
        """
        self._tensors = list(tensors.values())
        self._classes = [type(tensor) for tensor in self._tensors]
        names = {id(tensor): name for name, tensor in tensors.items()}
        self._barred = {kind: _barred(kind, names, owner) for kind in set(self._classes)}

    def put_up(self) -> None:
        """Let nobody use the tensors."""
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = self._barred[kind]

    def take_down(self) -> None:
        """Let them be used."""
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = kind


def without_barrier() -> Any:
    """A context in which this thread sees tensors as they are, for looking at what they have."""
    return torch._C.DisableTorchFunctionSubclass()


def _barred(kind: type, names: Mapping[int, str], owner: object) -> type:
    """A class like ``kind`` whose every use is an error."""

    def refuse(
        _cls: type,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no bytes, and refuse the rest."""
        if function in _NEEDS_NO_BYTES:
            with without_barrier():
                return function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        name = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), "a parameter")
        message = f"`{name}` was used while its model is parked\nhint: wake the model first"
        raise ParkError(message, "parked", name)

    members = {"__torch_function__": classmethod(refuse), "memfit_owner": owner}
    return type(f"Parked{kind.__name__}", (kind,), members)


_ATTRIBUTES = (
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_sparse",
    "layout",
    "nbytes",
    "ndim",
    "shape",
)
_SETTABLE = ("grad", "requires_grad")
_METHODS = (
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_shared",
    "nelement",
    "numel",
    "size",
    "storage_offset",
    "stride",
)
_NEEDS_NO_BYTES = {
    *(getattr(Tensor, name).__get__ for name in (*_ATTRIBUTES, *_SETTABLE)),
    *(getattr(Tensor, name).__set__ for name in _SETTABLE),
    *(getattr(Tensor, name) for name in _METHODS),
}
"""What a program asks of a model that it does not run: how large it is, where its gradients are."""
