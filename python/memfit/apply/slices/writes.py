"""Writes to what logits are made of that were put off, seen before they happen.

Plain torch has computed the logits by then. Responsible for telling from a call, as a function mode
sees it, that it writes to such memory or changes what is trained, and for having the logits made
first. Not responsible for making them (:mod:`memfit.apply.slices.deferred`), nor for writes that no
mode sees (:mod:`memfit.apply.slices.weight_copies`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor


class PutOff(Protocol):
    """What was put off."""

    def made_of(self) -> Iterator[Tensor]:
        """What it is made of, as it is now."""

    def make(self, who: str) -> None:
        """Make it now, if there is still somebody to look at it."""


WATCHED: WeakSet[PutOff] = WeakSet()
"""What has not been made yet."""

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "idiv", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)

_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]

_SETTERS = (Tensor.data.__set__, _SET_REQUIRES_GRAD)  # type: ignore[attr-defined]

_TRAINS = (Tensor.requires_grad_, _SET_REQUIRES_GRAD)


def make_what_is_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make what is made of memory that a call is about to write to.

    Args:
        func: A function of torch's.
        args: Its arguments.
        kwargs: The same.
    """
    if not WATCHED or not _writes(func, kwargs):
        return
    first = args[0] if args else list(kwargs.values())
    trains = args[1] if args[1:] else kwargs.get("requires_grad", True)
    if func in _TRAINS and trains == getattr(first, "requires_grad", None):
        return  # as it is
    written = {key for it in (first, kwargs.get("out")) for key in _memory(it)}
    for put_off in list(WATCHED):
        if not written.isdisjoint(key for it in put_off.made_of() for key in _memory(it)):
            put_off.make(getattr(func, "__name__", str(func)))


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call may write to its first argument, or change what is trained."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return func in _SETTERS
    by_name = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return by_name or bool(kwargs.get("inplace")) or "out" in kwargs


def _memory(value: Any) -> Iterator[int]:
    """Which memory tensors lie in, themselves or in a list."""
    if type(value).__name__ in {"DeferredLogits", "EdgeTensor"}:
        return  # it has none of its own
    if isinstance(value, Tensor):
        try:
            yield value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # a class of tensors that has none
            return
    elif isinstance(value, (list, tuple)):
        for it in value:
            yield from _memory(it)
