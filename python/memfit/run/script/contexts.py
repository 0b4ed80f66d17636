"""Leaving a context that the script knows nothing of.

Responsible for the two stacks of torch on which a planned or observed forward stands: dispatch
modes and default hooks of saved tensors. A forward begins at a model call and ends at
``backward()``; what the script enters in between it may leave later. So before the end, what lies
above is taken off, and put back afterwards. Not responsible for what is entered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def occupied() -> str:
    """What the script has on either stack, as the rest of a clause; empty for nothing."""
    modes = _get_current_dispatch_mode_stack()
    if not all(getattr(mode, "carries_out_ops", False) for mode in modes):
        return "runs under a dispatch mode of its own"
    if _top_saved_tensors_default_hooks(True) is not None:  # noqa: FBT003 - takes no keyword
        return "runs under saved-tensor hooks of its own"
    return transform()


def transform() -> str:
    """The same of transforms alone."""
    under = torch._C._functorch.peek_interpreter_stack() is not None
    return "runs under a transform of `torch.func`" if under else ""


def is_traced() -> bool:
    """Whether torch traces what runs, by a mode that is not taken off in the order of entering."""
    return any(hasattr(mode, "_mode_key") for mode in _get_current_dispatch_mode_stack())


def in_node() -> bool:
    """Whether autograd runs a node on this thread: a hook of the script's has been called.

    What is put on or taken off either stack inside is as it was before once the node has run.
    """
    return torch._C._current_autograd_node() is not None


@contextlib.contextmanager
def entered(mode: TorchDispatchMode) -> Iterator[None]:
    """Stand on the stack of dispatch modes, whatever the script enters and does not leave inside.

    Args:
        mode: The mode.
    """
    mode.__enter__()  # type: ignore[no-untyped-call]
    nesting = Nesting()
    try:
        yield
    finally:
        with nesting.cleared():
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Nesting:
    """How high both stacks are where a context stands."""

    def __init__(self) -> None:
        """Look; to be made right after the context was entered."""
        self._modes = _len_torch_dispatch_stack()
        self._hooks = _top_saved_tensors_default_hooks(True)  # noqa: FBT003 - takes no keyword

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Leave the context inside this, whatever the script has entered since."""
        modes = []
        while _len_torch_dispatch_stack() > self._modes:
            modes.append(_pop_mode())
        hooks: list[Any] = []
        while (top := _top_saved_tensors_default_hooks(True)) not in (None, self._hooks):  # noqa: FBT003
            hooks.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            for pack, unpack in reversed(hooks):
                torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
            for mode in reversed(modes):
                _push_mode(mode)
