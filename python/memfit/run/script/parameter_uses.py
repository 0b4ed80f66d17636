"""Parameters that are used outside any module's call, which begins a step as a call does.

A method of the model's own that reads its weights, a scene of bare parameters that a function
renders: there is no call to see, or one comes when half of forward is over. Responsible for seeing
the first op on such a parameter. Not responsible for what begins then
(:mod:`memfit.run.script.script`).

A mode of torch functions sees every op before it runs, for a microsecond or two. So it is there
between steps only, and until all optimizers that were made have stepped, unless a step began by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode

Used = Callable[[Tensor, str, Any], None]
"""Told of a parameter, the name of the op, and all that it is called with."""

_LOOKS = frozenset(
    (
        # No graph comes of these.
        *("__deepcopy__", "__format__", "__get__", "__hash__", "__len__", "__reduce_ex__"),
        *("__repr__", "__set__", "__setstate__", "backward", "data_ptr", "detach", "dim"),
        *("element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
        *("is_inference", "is_pinned", "is_signed", "isfinite", "isinf", "isnan", "item"),
        *("nelement", "numel", "numpy", "register_hook", "register_post_accumulate_grad_hook"),
        *("requires_grad_", "retain_grad", "size", "storage", "storage_offset", "stride"),
        *("tolist", "untyped_storage", "empty_like", "full_like", "new_empty", "new_full"),
        *("new_ones", "new_tensor", "new_zeros", "ones_like", "rand_like", "randn_like"),
        *("zeros_like",),
        # These are asked for with gradients on to print them, or to keep a copy.
        *("abs", "all", "amax", "amin", "any", "clone", "cpu", "histc", "max", "mean", "median"),
        *("min", "norm", "std", "sum", "var", "vector_norm"),
    )
)
"""Functions of a parameter that begin no step."""


class ParameterUses:
    """What sees them, from :meth:`watch` to :meth:`leave`."""

    def __init__(self, is_idle: Callable[[], bool], used: Used) -> None:
        """Watch nothing yet.

        Args:
            is_idle: Whether a use would begin a step.
            used: Told of a use then.
        """
        self._is_idle = is_idle
        self._used = used
        self._mode: _Uses | None = None

    def watch(self) -> None:
        """See ops from now on, unless the script has a mode of its own: it takes off the last."""
        if self._mode is not None:
            self._mode.sees = True
        elif not _len_torch_function_stack():
            self._mode = _Uses(self._is_idle, self._used)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """See none; the mode itself goes if none of the script's lies above it."""
        if self._mode is None:
            return
        self._mode.sees = False
        if _top() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None


class _Uses(TorchFunctionMode):
    """Tells of ops on leaves that are trained."""

    def __init__(self, is_idle: Callable[[], bool], used: Used) -> None:
        super().__init__()
        self.sees = True
        self._is_idle = is_idle
        self._used = used
        self._thread = threading.get_ident()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.sees and torch.is_grad_enabled() and self._is_idle():
            leaf = next(_leaves((*args, *kwargs.values())), None)
            name = getattr(func, "__name__", "")
            if leaf is not None and name not in _LOOKS and threading.get_ident() == self._thread:
                self._used(leaf, name, (args, kwargs))
        return func(*args, **kwargs)


def _top() -> Any:
    """The mode that sees an op first; ``None`` without one."""
    height = _len_torch_function_stack()
    return _get_function_stack_at(height - 1) if height else None


def _leaves(given: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors that are trained, themselves or in a list."""
    for it in given:
        if isinstance(it, Tensor):
            if it.requires_grad and it.is_leaf:
                yield it
        elif isinstance(it, (list, tuple)):
            yield from _leaves(it)
