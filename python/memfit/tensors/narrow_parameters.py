"""Parameters that memfit holds in 16 bits for the time being.

Responsible for narrowing a parameter in place and widening it again, for telling which ones are
narrow, and for why one cannot be. The parameter stays the same object: ties, hooks and the
optimizer's groups hold. Not responsible for which are narrowed (the engine) nor for when
(:mod:`memfit.apply.precision.half_parameters`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from memfit.tensors.barrier import owner_of, without_barrier

if TYPE_CHECKING:
    from collections.abc import MutableMapping

NARROW = torch.bfloat16
"""What they are narrowed to, if nothing else is said."""

_TYPES = (NARROW, torch.float16)
"""What they may be narrowed to."""

_ORDINARY = (nn.Parameter, Tensor, FakeTensor)
"""Classes of parameters whose numbers, if they have any, are what torch says."""

_WIDE: MutableMapping[Tensor, torch.dtype] = WeakIdKeyDictionary()
"""What each was before."""


class OffloadedHalves(Protocol):
    """The lower halves of a parameter's numbers, which are not in memory."""

    def whole(self, upper: Tensor) -> Tensor:
        """All of them, which lie as their upper halves do."""

    def zero_(self) -> None:
        """Have all of them be nothing."""


_LOWER: MutableMapping[Tensor, tuple[Tensor | OffloadedHalves, int]] = WeakIdKeyDictionary()
"""Lower halves of those whose are kept, and the version of the parameter that they go with."""


def narrow(parameter: Tensor, dtype: torch.dtype = NARROW, *, keeps_lower: bool = False) -> None:
    """Hold a parameter of 32 bits in 16, and a gradient that it has.

    Args:
        parameter: The parameter; another type stays as it is.
        dtype: The type of 16 bits.
        keeps_lower: Whether the lower halves of its numbers are kept, of ``bfloat16``.
    """
    if is_narrow(parameter) and parameter.dtype is not dtype:
        widen([parameter])
    if parameter.dtype is torch.float32:
        _WIDE[parameter] = parameter.dtype
        upper, lower = halves(parameter.data) if keeps_lower else (None, None)
        _convert(parameter, dtype, upper)
        if lower is not None:
            _LOWER[parameter] = lower, parameter._version
    elif not keeps_lower:
        _LOWER.pop(parameter, None)
    elif is_narrow(parameter) and parameter not in _LOWER:
        lower = torch.zeros_like(parameter.data, dtype=torch.int16)
        _LOWER[parameter] = lower, parameter._version


def lower_half(parameter: Tensor) -> Tensor | OffloadedHalves | None:
    """The lower halves of a narrow parameter's numbers, as they lie; ``None`` where none are kept.

    They are nothing where somebody else has written to the parameter.

    Args:
        parameter: The parameter.
    """
    lower, version = _LOWER.get(parameter, (None, 0))
    if lower is not None and version != parameter._version:
        lower.zero_()
        belongs(lower, parameter)
    return lower


def belongs(lower: Tensor | OffloadedHalves, parameter: Tensor) -> None:
    """Lower halves go with a parameter as it is now, after both were updated or moved."""
    _LOWER[parameter] = lower, parameter._version


def widen(parameters: Iterable[Tensor]) -> None:
    """Hold what is narrow as it was before, with the values that it has now.

    Args:
        parameters: Those that may be; the others stay as they are.
    """
    if not _WIDE:
        return  # before the first is asked for: every step begins with this
    for parameter in parameters:
        if is_narrow(parameter):
            lower = lower_half(parameter)
            if lower is not None and not isinstance(lower, Tensor):
                lower = lower.whole(parameter.data)
            whole = None if lower is None else joined(parameter.data, lower)
            _convert(parameter, _WIDE[parameter], whole)
        _WIDE.pop(parameter, None)
        _LOWER.pop(parameter, None)


def is_narrow(parameter: Tensor) -> bool:
    """Whether a parameter is held in 16 bits by memfit, not by its owner.

    Args:
        parameter: The parameter.
    """
    return parameter.dtype in _TYPES and parameter in _WIDE


def own_type(parameter: Tensor) -> torch.dtype:
    """The type that a parameter has when memfit does not narrow it.

    Args:
        parameter: The parameter.
    """
    return _WIDE[parameter] if is_narrow(parameter) else parameter.dtype


def alias_refusal(model: nn.Module, names: Iterable[str]) -> str | None:
    """Why parameters cannot be narrowed one by one; ``None`` where they can.

    Args:
        model: The model.
        names: Their names.

    Returns:
        One clause.
    """
    owners: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owners.setdefault(_memory(tensor), []).append(name)
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = named.get(name)
        if parameter is None:
            return f"the model has no parameter `{name}`"
        if type(parameter) not in _ORDINARY and owner_of(parameter) is None:
            return f"`{name}` is a `{type(parameter).__name__}`"
        others = [it for it in owners[_memory(parameter)] if named.get(it) is not parameter]
        if others:
            return f"`{name}` lies in the same memory as `{others[0]}`"
    return None


def range_refusal(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> str | None:
    """Why a type of 16 bits does not hold parameters; ``None`` where it does, as ``bfloat16`` all.

    Args:
        model: The model.
        names: Their names.
        dtype: The type.

    Returns:
        One clause.
    """
    most = torch.finfo(dtype).max
    if most >= torch.finfo(torch.bfloat16).max:
        return None
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if isinstance(named[name], FakeTensor) or not named[name].numel():
            continue  # without values
        least, largest = torch.aminmax(named[name].detach())
        size = max(-float(least), float(largest))
        if size > most:
            type_name = str(dtype).removeprefix("torch.")
            return f"`{name}` holds a number of {size:.3g}, and {type_name} ends at {most:.0f}"
    return None


def _memory(tensor: Tensor) -> int:
    with without_barrier():  # what is elsewhere stays there
        return int(tensor.untyped_storage()._cdata)


def _convert(parameter: Tensor, dtype: torch.dtype, data: Tensor | None) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype) if data is None else data
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


_INFINITE = 0x7F80
"""The bits of infinity in ``bfloat16``."""

_SLICE = 1 << 20
"""Numbers that are taken apart at once."""


def halves(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of 32 bits as the nearest ``bfloat16`` and what that is off by, in the last bit.

    The bits of both add up to the number's, as the kernel has it
    (``crates/memfit-memory/src/moments/halves.rs``).

    Args:
        wide: The numbers, which lie densely.
    """
    upper = torch.empty_like(wide, dtype=NARROW)
    lower = torch.empty_like(wide, dtype=torch.int16)
    flat = (_flat(wide), _flat(upper), _flat(lower))
    for numbers, above, below in zip(*(torch.split(one, _SLICE) for one in flat), strict=True):
        room = torch.empty_like(numbers, dtype=torch.int32)
        split_slice(numbers.clone(), above, below, room)
    return upper, lower


def split_slice(numbers: Tensor, upper: Tensor, lower: Tensor, room: Tensor) -> None:
    """Write both halves of numbers.

    Args:
        numbers: Of 32 bits; they are changed.
        upper: Where the nearest ``bfloat16`` go.
        lower: Where goes what these are off by.
        room: Room for as many numbers of 32 bits.
    """
    is_none = numbers.isnan()
    bits = numbers.masked_fill_(is_none, 0.0).view(torch.int32)
    # The last 16 bits with their sign: -32768 to 32767.
    off = torch.bitwise_and(bits, 0xFFFF, out=room).bitwise_xor_(0x8000).sub_(0x8000)
    lower.copy_(off)
    upper.view(torch.int16).copy_(bits.sub_(off).bitwise_right_shift_(16))
    upper.masked_fill_(is_none, float("nan"))


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """The numbers of 32 bits of both halves.

    Args:
        upper: The nearest ``bfloat16``.
        lower: What that is off by.
    """
    whole = torch.empty_like(upper, dtype=torch.float32)
    off, another = (torch.empty_like(upper, dtype=torch.int32) for _ in range(2))
    join_slice(upper, lower, whole, (off, another))
    return whole


def join_slice(upper: Tensor, lower: Tensor, into: Tensor, room: tuple[Tensor, Tensor]) -> None:
    """Write the numbers of both halves.

    Somebody may have written upper halves since, through ``.data`` unseen: zero is zero then, and
    infinity stays so. Of others, what that was off by is less than half of their last bit.

    Args:
        upper: The nearest ``bfloat16``.
        lower: What that is off by.
        into: Where they go.
        room: Room for as many whole numbers of 32 bits, twice.
    """
    bits, (off, another) = into.view(torch.int32), room
    off.copy_(lower)
    # What goes with zero is not below it, what goes with infinity not above.
    for size, bounds in ((0, {"max": 0}), (_INFINITE, {"min": 0})):
        bits.copy_(upper.view(torch.int16)).bitwise_and_(0x7FFF).eq_(size)
        off.sub_(torch.clamp(off, **bounds, out=another).mul_(bits))
    bits.copy_(upper.view(torch.int16)).bitwise_left_shift_(16).add_(off)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
