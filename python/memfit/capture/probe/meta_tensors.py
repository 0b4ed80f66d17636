"""Tensors of the meta device in place of the processor's, for code that allocates as it computes.

Responsible for twins without memory of tensors, and for ops that would make others in memory while
the mode is entered. An optimizer's step takes about a quarter of the time that it takes on fakes,
which know more of devices and values than it asks for; what it asks for and meta tensors cannot
answer raises, and fakes tell. Not responsible for what the ops take
(:mod:`memfit.capture.probe.optimizer_updates`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.probe.any_scalar import SCALAR, any_of

_META = torch.device("meta")


class MetaTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, ops that make tensors of no other make them on the meta device.

    Single numbers stay numbers, as the counter of an optimizer's steps, from which it reads.
    """

    def __init__(self) -> None:
        """Make no twin yet."""
        super().__init__()  # type: ignore[no-untyped-call]

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """A twin: of the same size, strides and type, without memory; a single number is copied.

        Args:
            tensor: One in memory of the processor.
        """
        if tensor.dim() == 0:
            return tensor.clone()
        sizes = tensor.size(), tensor.stride()
        return torch.empty_strided(*sizes, dtype=tensor.dtype, device=_META)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op.

        Raises:
            NotImplementedError: It draws random numbers, which would be those of the program.
        """
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"`{func}` draws random numbers")
        if func is SCALAR and args[0].is_meta:
            return any_of(args[0])
        if _writes_only(func) and _is_meta(args[0]):
            return args[0] if func._schema.returns else None  # there is nothing to write
        if _makes_tensors(func) and not _of_one_number(args):
            kwargs = {**(kwargs or {}), "device": _META}
        return func(*args, **(kwargs or {}))


@cache
def _writes_only(func: Any) -> bool:
    """Whether an op writes to its first argument, element by element, and makes nothing."""
    name = func._schema.name.partition("::")[2]
    is_pointwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    return bool(is_pointwise and name.endswith("_"))


def _is_meta(argument: Any) -> bool:
    first = argument[0] if isinstance(argument, (list, tuple)) and argument else argument
    return isinstance(first, Tensor) and first.is_meta


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether an op makes a tensor from numbers alone."""
    takes = [str(argument.type) for argument in func._schema.arguments]
    names = [argument.name for argument in func._schema.arguments]
    return "device" in names and not any("Tensor" in each for each in takes)


def _of_one_number(args: tuple[Any, ...]) -> bool:
    """Whether the size that an op was given is that of a tensor without dimensions."""
    return not args or not isinstance(args[0], (list, tuple)) or not args[0]
