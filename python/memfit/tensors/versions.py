"""How often torch has counted a write to a tensor.

Responsible for reading a version counter and for sharing it without memory. A tensor made by
``.data`` has a counter of its own. Not responsible for what follows from a write.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def version_of(tensor: Tensor) -> int:
    """The version counter of a tensor, or -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def counter_of(tensor: Tensor) -> Tensor | None:
    """A tensor that shares the version counter of another, and none of its memory.

    An alias shares the counter, and keeps it when it is given other data (``shallow_copy_from`` in
    torch's ``c10/core/TensorImpl.h``). A fake cannot be given other data, but another storage.

    Args:
        tensor: A tensor as autograd has it; an inference tensor has no counter.
    """
    if tensor.is_inference():
        return None
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        counter = tensor.detach()
        if isinstance(tensor, FakeTensor):
            with torch.autograd._unsafe_preserve_version_counter(counter):  # type: ignore[attr-defined]
                counter.set_(torch.UntypedStorage(0, device="meta"), 0, (0,), (1,))  # type: ignore[no-untyped-call]
        else:
            empty(counter)
    return counter


def empty(counter: Tensor) -> None:
    """Let go of the memory of a tensor, and keep its version counter.

    Args:
        counter: The tensor, which nobody else has.
    """
    with torch._C._DisableTorchDispatch():
        counter.data = _nothing(counter.device)


@cache
def _nothing(device: torch.device) -> Tensor:
    """A tensor without memory."""
    with torch._C._DisableTorchDispatch():  # no op of the script's, which may be recorded
        return torch.empty(0, device=device)
