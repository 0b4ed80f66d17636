"""Calls of a pool's models, seen before they run.

Responsible for noticing that a model is called while it is used, and for what follows where the
call is larger than what was set aside: room for it first, or an error before anything is allocated.
Not responsible for how many bytes a call takes (:mod:`memfit.share.pool.law`) nor for making room
(:mod:`memfit.share.pool.pool`).

Nothing is refused on the law's word: where there is no room for what it foresees, just this call is
recorded, without running it, and what that says counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memfit.errors import PoolError
from memfit.share.pool.activations import Inputs
from memfit.share.pool.law import CallLaw, Unforeseen

_MOST_KNOWN = 4096
"""Forms of calls that are remembered."""

MakeRoom = Callable[["Use", int, str], None]
"""Sets aside so many bytes for a use, all told, whose call is told in words."""


@dataclass(slots=True)
class Use:
    """A use of a model that was granted.

    Attributes:
        ticket: The engine's number for it.
        model: The engine's number for its model.
        counted_bytes: What it counts with besides the model.
        wait_seconds: How long it waits for room; ``None`` for ever.
        thread: The thread that asked for it.
        unforeseen: Why the law said nothing of a call; empty where it did.
    """

    ticket: int
    model: int
    counted_bytes: int
    wait_seconds: float | None
    thread: int = field(default_factory=threading.get_ident)
    unforeseen: str = ""


@dataclass(slots=True)
class _Known:
    """What is known of calls of one form.

    Attributes:
        bytes: What they take; 0 where nothing is known.
        is_sure: Whether one was recorded for it.
        unforeseen: Why nothing is known.
    """

    bytes: int
    is_sure: bool = False
    unforeseen: str = ""


class Calls:
    """A hook before the forward of one model of a pool; copies of the model have none."""

    def __init__(self, law: CallLaw, make_room: Callable[[], MakeRoom | None]) -> None:
        """Know what calls take.

        Args:
            law: What they take.
            make_room: Gives what sets room aside, as long as there is a pool.
        """
        self._law = law
        self._device_type = law.device_type
        self._make_room = make_room
        self._uses: list[Use] = []
        self._known: dict[Any, _Known] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """See calls of a model from now on.

        Args:
            model: The model that the law is of.
        """
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def end(self) -> None:
        """See no more calls."""
        if self._handle is not None:
            self._handle.remove()

    def begin_use(self, use: Use) -> None:
        """A use of the model was granted; the pool's lock is held."""
        self._uses.append(use)

    def end_use(self, use: Use) -> None:
        """A use has ended; the pool's lock is held."""
        self._uses.remove(use)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to be called."""
        if not self._uses or torch.compiler.is_compiling():
            return
        use = self._use()
        if use is None:
            return
        form: Any = (model.training, torch.is_autocast_enabled(self._device_type))
        form = (*form, _form(args), _form(kwargs))
        known = self._known.get(form)
        if known is None:
            known = self._learn(form, model, (args, kwargs))
        if known.unforeseen:
            use.unforeseen = known.unforeseen
        elif known.bytes > use.counted_bytes:
            self._set_aside(use, known, model, (args, kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        """What a copy of the model has in its place."""
        return _unwatched, ()

    def _use(self) -> Use | None:
        """The use that a call of this thread belongs to: its own, else the only one."""
        uses, thread = self._uses, threading.get_ident()
        own = [use for use in uses if use.thread == thread]
        if own:
            return own[-1]
        return uses[0] if len(uses) == 1 else None

    def _learn(self, form: Any, model: nn.Module, inputs: Inputs) -> _Known:
        """Ask the law about calls of a form, and remember what it says."""
        try:
            sizes = self._law.sizes_of(model, inputs)
            is_small = sizes.are_within_example
            known = _Known(self._law.declared_bytes if is_small else self._law.bytes_at(sizes)[1])
        except Unforeseen as reason:
            known = _Known(0, unforeseen=str(reason))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[form] = known
        return known

    def _set_aside(self, use: Use, known: _Known, model: nn.Module, inputs: Inputs) -> None:
        """Have room made for a call that is larger than what was set aside.

        Raises:
            PoolError: There is none.
        """
        make_room = self._make_room()
        if make_room is None:
            return
        said = _said(inputs)
        try:
            make_room(use, known.bytes, said)
        except PoolError:
            if known.is_sure:
                raise
            try:
                known.bytes, known.is_sure = self._law.recorded_bytes(model, inputs), True
            except Unforeseen as reason:
                known.unforeseen = use.unforeseen = str(reason)
                return
            if known.bytes > use.counted_bytes:
                make_room(use, known.bytes, said)


def _unwatched() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    return None


def _form(value: Any) -> Any:
    """What two calls have in common of which the law says the same."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.layout
    if isinstance(value, dict):
        return tuple((key, _form(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(_form(item) for item in value)
    return (type(value), value) if isinstance(value, int | float | str | None) else type(value)


def _said(inputs: Inputs) -> str:
    """The tensors of a call, in words."""
    args, kwargs = inputs
    named = [*((f"argument {at}", it) for at, it in enumerate(args)), *kwargs.items()]
    shapes = [f"`{name}` of {list(it.shape)}" for name, it in named if isinstance(it, Tensor)]
    return " and ".join(shapes) or "such inputs"
