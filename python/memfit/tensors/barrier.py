"""A barrier before tensors whose bytes are not in memory.

Responsible for letting somebody know, before it happens, wherever Python or an op of torch touches
such a tensor: forward, an optimizer's step, ``print``, ``state_dict``. Not responsible for what is
done then, an error (:mod:`memfit.share.park.parked`) or having the bytes back
(:mod:`memfit.apply.offload.parameters`), nor for code that reaches the bytes in another way.

A tensor's class is exchanged for one that answers ``__torch_function__``. The object, its gradient
and its hooks stay; putting the class back takes the barrier away, and until then it costs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Barrier:
    """Can be put before some tensors."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        owner: object,
        on_use: Callable[[list[Tensor]], None],
    ) -> None:
        """Create it, taken down.

        Args:
            tensors: The tensors.
            owner: Whose it is, see :func:`owner_of`; lives as long as it is up.
            on_use: Called with those behind it that are about to be used. Raises, or takes it down.
        """
        self._tensors = list(tensors)
        self._classes = [type(tensor) for tensor in self._tensors]
        self._kinds = {id(t): kind for t, kind in zip(self._tensors, self._classes, strict=True)}
        behind = frozenset(self._kinds)
        self._barred = {kind: _barred(kind, behind, owner, on_use) for kind in set(self._classes)}

    def put_up(self) -> None:
        """Let nobody use the tensors unnoticed."""
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = self._barred[kind]

    def take_down(self) -> None:
        """Let them be used."""
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = kind

    def let_through(self, tensor: Tensor) -> None:
        """Let one of them be used."""
        tensor.__class__ = self._kinds[id(tensor)]


def owner_of(tensor: Tensor) -> object | None:
    """Whose barrier a tensor is behind; ``None`` where there is none."""
    return getattr(type(tensor), "memfit_owner", None)


def without_barrier() -> Any:
    """A context in which this thread sees tensors as they are, for looking at what they have."""
    return torch._C.DisableTorchFunctionSubclass()


def _barred(
    kind: type, behind: frozenset[int], owner: object, on_use: Callable[[list[Tensor]], None]
) -> type:
    """A class like ``kind`` whose every use is noticed."""

    def notice(
        _cls: type,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no bytes, and let somebody know of the rest."""
        if function in _NEEDS_NO_BYTES:
            with without_barrier():
                return function(*args, **(kwargs or {}))
        leaves = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in behind}
        on_use(list(leaves.values()))
        return function(*args, **(kwargs or {}))

    def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        """Copy what is there: a parameter gives its copy the class that it has when it begins."""
        on_use([tensor])
        return copy.deepcopy(tensor, memo)

    members = {
        "__torch_function__": classmethod(notice),
        "__deepcopy__": deep_copy,
        "memfit_owner": owner,
    }
    return type(f"Absent{kind.__name__}", (kind,), members)


_ATTRIBUTES = (
    "_version",
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
