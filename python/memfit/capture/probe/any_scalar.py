"""Numbers for an optimizer that asks for values while it runs on fakes.

Responsible for answering ``.item()`` inside ``optimizer.step()`` with some number where the value
is not known: optimizers scale by such numbers (Adafactor by the norm of a parameter) and allocate
the same whatever they are. It is neither 0 nor 1: NAdam divides by one less a product of decays.
Not responsible for the model's forward, where a made-up value could send control flow down a branch
the real step does not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

SCALAR = torch.ops.aten._local_scalar_dense.default


def scalar_or_any(tensor: Tensor) -> Any:
    """The number in a one-element tensor, or one of its type where a fake does not know it.

    Args:
        tensor: A one-element tensor.

    Returns:
        A Python number.
    """
    try:
        return SCALAR(tensor)
    except DataDependentOutputException:
        return any_of(tensor)


def any_of(tensor: Tensor) -> Any:
    """A number of a tensor's type, which is neither 0 nor 1 where it can be.

    Args:
        tensor: The tensor.
    """
    if tensor.dtype is torch.bool:
        return True
    return 0.5 if tensor.dtype.is_floating_point else 1


_OF_TORCH = frozenset({"aten", "prim", "prims", "profiler"})


class AnyScalar(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers ``.item()`` by :func:`scalar_or_any` while it is entered; changes nothing else.

    Attributes:
        others: Names of ops that ran and are not torch's own. On fakes they show what they return,
            not what they take meanwhile.
    """

    def __init__(self) -> None:
        """Nothing has run yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op."""
        if func is SCALAR:
            return scalar_or_any(args[0])
        if func.namespace not in _OF_TORCH:
            self.others[str(func)] = None
        return func(*args, **(kwargs or {}))
