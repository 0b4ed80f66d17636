"""Weights of linear layers that memfit holds in 8 bits for the time being.

Responsible for quantising them in place, one after another, for putting weights of the model's own
type back, for telling which ones are quantised, and for why one cannot be. Not responsible for the
arithmetic, which is torchao's (:mod:`memfit.weights.by_rows`, and
:mod:`memfit.weights.eight_bit_products` for products in 8 bits), nor for when
(:mod:`memfit.apply.precision.int8_weights`).

While a weight is quantised the parameter that it stands for has its shape and no numbers: to read
it, where somebody has kept it, is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from memfit.errors import UsageError
from memfit.tensors.barrier import Barrier
from memfit.tensors.heap import trim
from memfit.weights.by_rows import quantize_by_rows, quantize_whole, require_torchao
from memfit.weights.eight_bit_products import set_products
from memfit.weights.slots import Slot, slots_of
from memfit.weights.weightless import fake_mode_of

if TYPE_CHECKING:
    from collections.abc import MutableMapping


@dataclass(frozen=True)
class _Own:
    """The model's own parameter of a quantised weight, without its numbers.

    Attributes:
        parameter: It.
        barrier: Makes reading it meanwhile an error; ``None`` for one that never had numbers.
    """

    parameter: nn.Parameter
    barrier: Barrier | None


_OWN: MutableMapping[Tensor, _Own] = WeakIdKeyDictionary()
"""What each weight that is quantised stands for."""


def linear_weights(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of these parameters are weights of linear layers that can be quantised.

    Args:
        model: The model.
        names: Names of parameters.

    Returns:
        The names, in the model's order, one for each weight; those that are quantised by now too.
    """
    wanted = set(names)
    found = [slot for slot in slots_of(model) if wanted.intersection(slot.names)]
    return [next(filter(wanted.__contains__, it.names)) for it in found if _is_quantizable(it)]


def _is_quantizable(slot: Slot) -> bool:
    own = _OWN.get(slot.tensor)
    dtype = slot.tensor.dtype if own is None else own.parameter.dtype
    return not slot.why_kept() and dtype is torch.float32


def quantize(model: nn.Module, names: Collection[str], dynamic: Collection[str] = ()) -> None:
    """Hold weights of linear layers in 8 bits, and all others in the model's own type.

    Args:
        model: The model.
        names: Names of the weights.
        dynamic: Those of them whose products are in 8 bits too.

    Raises:
        UsageError: torchao is not installed, or one is no weight that it quantises.
    """
    require_torchao()
    wanted, put = set(names), False
    for slot in slots_of(model):
        if not wanted.intersection(slot.names):
            _put_back(slot)
            continue
        wanted.difference_update(slot.names)
        multiplies = not set(dynamic).isdisjoint(slot.names)
        if slot.tensor in _OWN:
            set_products(slot.tensor, in_eight_bits=multiplies)
        else:
            _quantize(slot, multiplies=multiplies)
            put = True
    if wanted:
        raise UsageError(f"the model has no parameter `{min(wanted)}`")
    if put:
        trim()


def _quantize(slot: Slot, *, multiplies: bool) -> None:
    layer, own = slot.places[0][0], slot.tensor
    if not _is_quantizable(slot) or not isinstance(layer, nn.Linear):
        reason = slot.why_kept() or f"`{own.dtype}`"
        raise UsageError(f"`{slot.names[0]}` cannot be held in 8 bits: {reason}")
    assert isinstance(own, nn.Parameter)  # what is no parameter is no weight
    is_fake = fake_mode_of(layer) is not None
    way = quantize_whole if is_fake else quantize_by_rows
    # An interrupt may come anywhere: from the moment that the model has another tensor, it is known
    # for which parameter, and that has its numbers until then.
    try:
        is_quantized = way(layer, own.detach(), own.dtype)
        barrier = None if is_fake else _barrier(own, slot.names[0])
        if is_quantized:
            set_products(layer.weight, in_eight_bits=multiplies)
            _OWN[layer.weight] = _Own(own, barrier)
        slot.put(layer.weight if is_quantized else own)
    except BaseException:
        slot.put(own)
        raise
    if not is_quantized:
        raise UsageError(f"torchao leaves `{slot.names[0]}` as it is")
    if barrier is not None:
        own.data = own.data.new_empty(()).expand(own.shape)
        barrier.put_up()


def _barrier(own: nn.Parameter, name: str) -> Barrier:
    """What makes reading a parameter without numbers an error, once it is put up."""

    def refuse(_used: list[Tensor], _by: object) -> NoReturn:
        message = f"`{name}` is held in 8 bits by a plan: the model has another tensor in its place"
        raise UsageError(f"{message}\nhint: `Fitted.close()` puts it back")

    return Barrier([own], _OWN, refuse)


def restore(model: nn.Module) -> None:
    """Hold what is quantised in the model's own type again, with the values it was rounded to.

    Args:
        model: The model.
    """
    if not _OWN:
        return  # before the first is asked for: every step begins with this
    for slot in slots_of(model):
        _put_back(slot)


def _put_back(slot: Slot) -> None:
    own = _OWN.get(slot.tensor)
    if own is not None:
        weight = slot.tensor
        if own.barrier is not None:
            own.barrier.take_down()
        own.parameter.data = weight.dequantize()
        slot.put(own.parameter)
        del _OWN[weight]


def own_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's own parameters of weights that are quantised now, by name; without values.

    Args:
        model: The model.
    """
    if not _OWN:
        return {}
    slots = (slot for slot in slots_of(model) if slot.tensor in _OWN)
    return {name: _OWN[slot.tensor].parameter for slot in slots for name in slot.names}
