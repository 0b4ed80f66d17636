"""View ops that autograd runs by itself, on fakes only.

Responsible for telling them from the script's own, so that a trace holds what the real step runs.
Not responsible for recording.

Where a view is written to, autograd gives it a new node at once. For ordinary tensors the node is
made by strides alone. For tensor subclasses, which fakes are, autograd calls the view ops that led
from the base to the view again, and throws the result away (``VariableHooks::grad_fn`` in
``torch/csrc/autograd/variable.cpp``; ``is_python_dispatch`` in ``ADInplaceOrViewType``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Geometry = tuple[torch.Size, tuple[int, ...], int]


class ViewReplays:
    """Follows writes to views, and the view ops right after them."""

    def __init__(self) -> None:
        """Expect none."""
        self._source: Tensor | None = None
        self._target: Geometry | None = None

    def expect(self, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """An op has written to tensors, not yet known to autograd.

        Args:
            written: What it wrote to.
            read: All it read.
        """
        self._source = None
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in read):
            return
        for tensor in written:
            if tensor._is_view():
                self._source, self._target = tensor._base, _geometry(tensor)

    def is_next(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether an op is one of autograd's own; each op that is about to run is asked about.

        Args:
            func: The op.
            args: Its arguments.
        """
        if self._source is None:
            return False
        if func.is_view and args and args[0] is self._source:
            return True
        self._source = None
        return False

    def ran(self, out: Any) -> None:
        """The op that was autograd's own has run.

        Args:
            out: What it returned.
        """
        is_last = not isinstance(out, Tensor) or _geometry(out) == self._target
        self._source = None if is_last else out


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())
