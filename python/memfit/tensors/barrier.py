"""A barrier before tensors whose bytes are not in memory.

Responsible for letting somebody know, before it happens, wherever Python or an op of torch touches
such a tensor: forward, an optimizer's step, ``print``, ``state_dict``. Not responsible for what is
done then, an error (:mod:`memfit.share.park.parked`) or having the bytes back
(:mod:`memfit.apply.offload.parameters`), nor for code that reaches the bytes in another way.

A tensor's class is exchanged for one that answers ``__torch_function__``. The object, its gradient
and its hooks stay; putting the class back takes the barrier away, and until then it costs nothing.
Or one thread passes while the others are still noticed: to that one the class has no
``__torch_function__``, as a parameter's has none.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit.tensors.transforms import ask_classes

OnUse = Callable[[list[Tensor], Callable[..., Any]], contextlib.AbstractContextManager[Any]]
"""Of tensors that are about to be used, and the function that uses them, what it runs inside."""


class Barrier:
    """Can be put before some tensors.

    Attributes:
        threads: Those that pass it now.
    """

    def __init__(self, tensors: Sequence[Tensor], owner: object, on_use: OnUse) -> None:
        """Create it, taken down.

        Args:
            tensors: The tensors.
            owner: Whose it is, see :func:`owner_of`; lives as long as it is up.
            on_use: Called with those behind it that are about to be used; the use runs inside what
                it returns. Raises, or lets through those that :meth:`cannot_be_passed`.
        """
        self._tensors = list(tensors)
        self._classes = [type(tensor) for tensor in self._tensors]
        self._kinds = {id(t): kind for t, kind in zip(self._tensors, self._classes, strict=True)}
        self.threads: set[int] = set()
        kinds = set(self._classes)
        self._barred = {kind: _barred(kind, self, owner, on_use) for kind in kinds}
        self._own = {kind for kind in kinds if not _is_plain(kind)}

    def put_up(self) -> None:
        """Let nobody use the tensors unnoticed."""
        ask_classes("memfit_owner")
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = self._barred[kind]

    def take_down(self) -> None:
        """Let them be used."""
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = kind

    def let_through(self, tensor: Tensor) -> None:
        """Let one of them be used."""
        tensor.__class__ = self._kinds[id(tensor)]

    def is_before(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of those it was made for."""
        return id(tensor) in self._kinds

    def cannot_be_passed(self, tensor: Tensor) -> bool:
        """Whether its class answers ``__torch_function__`` itself, so that it is let through."""
        return self._kinds[id(tensor)] in self._own

    @contextlib.contextmanager
    def opened(self, tensor: Tensor) -> Iterator[None]:
        """A tensor has its own class inside this."""
        before = type(tensor)
        if not self.is_before(tensor):
            yield
            return
        try:
            self.let_through(tensor)
            yield
        finally:
            tensor.__class__ = before

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """This thread uses the tensors unnoticed inside this, and so does backward."""
        thread = get_ident()
        try:
            self.threads.add(thread)
            yield
        finally:
            self.threads.discard(thread)


def owner_of(tensor: Tensor) -> object | None:
    """Whose barrier a tensor is behind; ``None`` where there is none."""
    return getattr(type(tensor), "memfit_owner", None)


def without_barrier() -> Any:
    """A context in which this thread sees tensors as they are, for looking at what they have."""
    return torch._C.DisableTorchFunctionSubclass()


class _Noticing:
    """What a barred class has for ``__torch_function__``, which depends on the thread."""

    def __init__(self, passing: Collection[int], notice: Callable[..., Any]) -> None:
        self._passing = passing
        self._notice = notice

    def __get__(self, _tensor: Tensor | None, _kind: type) -> Any:
        # Of a GPU's backward, hooks run in threads of torch's own.
        if self._passing and (
            get_ident() in self._passing or torch._C._current_graph_task_id() != -1
        ):
            return torch._C._disabled_torch_function_impl
        return self._notice


def _is_plain(kind: type) -> bool:
    """Whether torch looks for no ``__torch_function__`` of a class."""
    own: Any = getattr(kind, "__torch_function__", None)
    return kind is Tensor or own is torch._C._disabled_torch_function_impl


def _barred(kind: type, barrier: Barrier, owner: object, on_use: OnUse) -> type:
    """A class like ``kind`` whose every use is noticed."""

    def notice(
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no bytes, and let somebody know of the rest."""
        if function in _NEEDS_NO_BYTES:
            with without_barrier():
                return function(*args, **(kwargs or {}))
        leaves = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if _is_behind(leaf)}
        with on_use(list(leaves.values()), function), barrier.passing():
            return function(*args, **(kwargs or {}))

    def _is_behind(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and barrier.is_before(leaf)

    def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        """Copy what is there: a parameter gives its copy the class that it has when it begins."""
        with on_use([tensor], copy.deepcopy), barrier.opened(tensor):
            return copy.deepcopy(tensor, memo)

    members = {
        "__torch_function__": _Noticing(barrier.threads if _is_plain(kind) else (), notice),
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
