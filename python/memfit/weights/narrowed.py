"""A model that is there, frozen, in fewer bits: in bfloat16, or its linear layers in 8.

Responsible for putting narrower tensors in the places of a model's own, and for putting those back.
Not responsible for whether a model may be narrowed, which changes what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.weights.by_rows import COMPUTED_IN, quantize_by_rows, require_torchao
from memfit.weights.slots import Slot, slots_of
from memfit.weights.weightless import fake_mode_of

Form = Literal["half", "int8"]
"""``half``: all in bfloat16; ``int8``: weights of linear layers in 8 bits, the rest as it is."""

FORMS: tuple[Form, ...] = get_args(Form)


def narrow(model: nn.Module, form: Form) -> Callable[[], None]:
    """Put the state of a frozen model in fewer bits, in place.

    Args:
        model: The model; what it shares stays shared.
        form: In which form.

    Returns:
        Puts the model's own tensors back, which live as long as this does.

    Raises:
        UsageError: torchao is not installed, or the model has no weights that it could quantise.
    """
    if form == "int8":
        require_torchao()
        if fake_mode_of(model) is not None:
            raise UsageError("a model without weights cannot be quantised: build it ordinarily")
    slots = list(slots_of(model))
    before = [slot.tensor for slot in slots]

    def put_back() -> None:
        for slot, tensor in zip(slots, before, strict=True):
            slot.put(tensor)

    try:
        for slot in slots:
            if form == "half":
                _halve(slot)
            else:
                _quantize(slot)
    except BaseException:
        put_back()
        raise
    return put_back


def _halve(slot: Slot) -> None:
    if not slot.tensor.is_floating_point():
        return
    narrower: Tensor = slot.tensor.detach().to(torch.bfloat16)
    is_parameter = isinstance(slot.tensor, nn.Parameter)
    slot.put(nn.Parameter(narrower, requires_grad=False) if is_parameter else narrower)


def _quantize(slot: Slot) -> None:
    layer, tensor = slot.places[0][0], slot.tensor
    if slot.why_kept() or not isinstance(layer, nn.Linear) or tensor.dtype not in COMPUTED_IN:
        return
    is_quantized = quantize_by_rows(layer, tensor.detach(), tensor.dtype)
    slot.put(layer.weight if is_quantized else tensor)
