"""Torch's own checkpoints, as they are met in a forward.

Responsible for telling of each call of ``torch.utils.checkpoint`` before it runs, and for running
its body as an ordinary forward where that is asked for. Not responsible for whether it is: that
depends on what the body does besides (:mod:`memfit.run.script.checkpoints`).

An ordinary forward computes the same bits. Without reentrance the graph is the same, and only what
it saves is recomputed. With it the body has a graph of its own, in which the gradients of each
input are summed before they join those from outside: an alias of each input keeps that order.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import checkpoint as of_torch
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy, _CachingTorchDispatchMode

from memfit.torch_versions import function

_HOOKS_OPTION = "respect_saved_tensors_hooks"


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A call of torch's checkpoint.

    Attributes:
        body: The function that it runs, and runs again in backward.
        args: Its arguments.
        kwargs: Its keyword arguments.
        reentrant: Whether it has a graph of its own.
        keeps_random_state: Whether the body draws the same random numbers again.
        refusal: Why its body cannot run as an ordinary forward; empty where it can.
    """

    body: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reentrant: bool
    keeps_random_state: bool
    refusal: str


class Meeting(Protocol):
    """What becomes of one checkpoint.

    Attributes:
        undone: Whether its body runs as an ordinary forward.
    """

    undone: bool

    def ended(self) -> None:
        """The body has run in forward, or raised."""


class Hooks(Protocol):
    """What stands for tensors that bodies save when they run again."""

    def pack_recomputed(self, tensor: Tensor) -> Any:
        """What is held instead of a tensor, or itself; has its shape, type and device."""

    def unpack_recomputed(self, held: Any) -> Tensor:
        """The tensor for which something was held."""


class Checkpoints:
    """Stands in for torch's checkpoints, from :meth:`install` to :meth:`remove`.

    Attributes:
        hooks: What stands for tensors that bodies save when they run again, in those checkpoints
            that run as torch has them from now on; ``None`` for nothing.
    """

    def __init__(self, met: Callable[[Checkpoint], Meeting | None]) -> None:
        """Stand in for nothing yet.

        Args:
            met: Told of each checkpoint with gradients on; ``None`` is for leaving it alone.
        """
        self._met = met
        self._generator = function("checkpoint_generator")
        self._signature = inspect.signature(self._generator)
        self._stand_in: Any = None
        self._apply: Any = None
        self._before: tuple[Any, Any] = (None, None)
        self._standing: dict[str, tuple[Any, Any]] = {}
        self.hooks: Hooks | None = None

    def install(self) -> None:
        """Stand in for both kinds; what stands in already does so again after :meth:`remove`."""

        @functools.wraps(self._generator)
        def stand_in(*given: Any, **options: Any) -> Iterator[None]:
            return self._without_reentrance(*given, **options)

        name, kind = self._generator.__name__, CheckpointFunction
        self._before = getattr(of_torch, name), vars(kind).get("apply")
        self._stand_in = stand_in
        setattr(of_torch, name, stand_in)
        for original in (of_torch._checkpoint_hook, of_torch._recomputation_hook):
            name = original.__name__
            self._standing[name] = (original, self._hooked(original))
            setattr(of_torch, name, self._standing[name][1])
        self._apply = self._reentrant(super(kind, kind).apply)
        kind.apply = self._apply

    def remove(self) -> None:
        """Put back what was there, where nothing else stands in by now."""
        name, (generator, apply) = self._generator.__name__, self._before
        if getattr(of_torch, name) is self._stand_in:
            setattr(of_torch, name, generator)
        for name, (original, standing) in self._standing.items():
            if getattr(of_torch, name) is standing:
                setattr(of_torch, name, original)
        if vars(CheckpointFunction).get("apply") is self._apply:
            if apply is None:
                del CheckpointFunction.apply
            else:
                CheckpointFunction.apply = apply

    def _without_reentrance(self, *given: Any, **options: Any) -> Iterator[None]:
        """Torch's generator, which yields once, where the body runs."""
        bound = self._signature.bind(*given, **options)
        bound.apply_defaults()
        said = bound.arguments
        contexts = None
        refusal = ""
        if said["debug"] or of_torch._checkpoint_debug_enabled:
            refusal = "it is debugged"
        elif said["context_fn"] is not of_torch.noop_context_fn and torch.is_grad_enabled():
            contexts = said["context_fn"]()
            said["context_fn"] = lambda: contexts
            if type(contexts[0]) is not _CachingTorchDispatchMode:
                refusal = "it runs in contexts of its own"
        seen = Checkpoint(
            said["fn"],
            tuple(said["args"]),
            said["kwargs"],
            reentrant=False,
            keeps_random_state=said["preserve_rng_state"],
            refusal=refusal,
        )
        meeting = self._met(seen) if _is_met() else None
        if meeting is None:
            yield from self._generator(*bound.args, **bound.kwargs)
            return
        try:
            if meeting.undone:
                with _saving_nothing(contexts):
                    yield
            else:
                if said.get(_HOOKS_OPTION, False) is None:
                    said[_HOOKS_OPTION] = False  # the hooks around it are memfit's, not the user's
                yield from self._generator(*bound.args, **bound.kwargs)
        finally:
            meeting.ended()

    def _reentrant(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(body: Callable[..., Any], keeps_random_state: Any, *args: Any) -> Any:
            takes_part = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
            if not _is_met() or not takes_part:
                return original(body, keeps_random_state, *args)
            seen = Checkpoint(
                body,
                args,
                {},
                reentrant=True,
                keeps_random_state=bool(keeps_random_state),
                refusal="",
            )
            meeting = self._met(seen)
            if meeting is None:
                return original(body, keeps_random_state, *args)
            try:
                if meeting.undone:
                    return body(*(_alias(arg) for arg in args))
                return original(_hooked_again(body, self.hooks), keeps_random_state, *args)
            finally:
                meeting.ended()

        return apply

    def _hooked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's hooks, of forward or of a body that runs again, with others inside them."""
        saves = original.__name__ == "_recomputation_hook"

        @functools.wraps(original)
        def hooked(*given: Any) -> Any:
            hooks, of = self.hooks, original(*given)
            if hooks is None:
                return of
            pack, unpack = of.pack_hook, of.unpack_hook
            of.unpack_hook = lambda held: hooks.unpack_recomputed(unpack(held))
            if saves:

                @functools.wraps(pack)  # torch marks its own hooks
                def instead(tensor: Tensor) -> Any:
                    return pack(hooks.pack_recomputed(tensor))

                of.pack_hook = instead
            return of

        return hooked


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Run every checkpoint that can be as an ordinary forward, inside this, on this thread."""
    own = threading.get_ident()

    def met(seen: Checkpoint) -> _Undone | None:
        return _Undone() if not seen.refusal and threading.get_ident() == own else None

    standing = Checkpoints(met)
    standing.install()
    try:
        yield
    finally:
        standing.remove()


def _hooked_again(body: Callable[..., Any], hooks: Hooks | None) -> Callable[..., Any]:
    """The body of a reentrant checkpoint, with hooks where it runs with gradients: in backward."""
    if hooks is None:
        return body

    def again(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(*args)
        with torch.autograd.graph.saved_tensors_hooks(
            hooks.pack_recomputed, hooks.unpack_recomputed
        ):
            return body(*args)

    return again


class _Undone:
    undone = True

    def ended(self) -> None:
        """Nothing follows from it."""


def _saving_nothing(contexts: Any) -> contextlib.AbstractContextManager[Any]:
    """The contexts of forward without what they save: the policy is asked as ever."""
    if contexts is None:
        return contextlib.nullcontext()
    caching: Any = contexts[0]
    policy = caching.policy_fn

    def save_nothing(*args: Any, **kwargs: Any) -> CheckpointPolicy:
        policy(*args, **kwargs)
        return CheckpointPolicy.MUST_RECOMPUTE

    caching.policy_fn = save_nothing
    return caching  # type: ignore[no-any-return]


def _is_met() -> bool:
    """Whether a checkpoint does anything here, and not as part of the recomputation of another."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_autograd_node() is None
        and not torch.compiler.is_compiling()
    )


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value
