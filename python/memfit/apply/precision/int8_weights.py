"""Weights of linear layers in 8 bits, for inference.

Responsible for a plan's ``int8_weights`` and ``int8_dynamic`` actions: which weights are quantised
while the plan is followed, which of them multiply in 8 bits too, and from when on. Not responsible
for quantising them (:mod:`memfit.weights.in_eight_bits`), nor for what a layer computes with them
(torchao).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from memfit.apply.part import Part
from memfit.errors import UsageError
from memfit.weights.by_rows import require_torchao
from memfit.weights.eight_bit_products import products_refusal, require_products
from memfit.weights.in_eight_bits import linear_weights, quantize


class Int8Weights(Part):
    """Holds weights of a model in 8 bits."""

    def __init__(self, model: nn.Module, said: Mapping[str, Any]) -> None:
        """Prepare; nothing is quantised before :meth:`place`.

        Args:
            model: Whose weights the plan names.
            said: ``Int8Weights`` of the plan as parsed JSON.

        Raises:
            UsageError: It is no such thing, torchao is not installed, or a weight cannot be
                quantised.
        """
        names, dynamic = said.get("names"), said.get("dynamic", [])
        if not isinstance(names, list):
            message = "what the plan says of `int8_weights` is malformed: it has no `names`"
            raise UsageError(message)
        if not isinstance(dynamic, list) or not set(dynamic).issubset(names):
            message = "what the plan says of `int8_dynamic` is malformed: `dynamic` are no `names`"
            raise UsageError(message)
        require_torchao()
        others = set(names).difference(linear_weights(model, names))
        if others:
            message = (
                f"the plan holds `{min(others)}` in 8 bits, which is no weight of a linear layer "
                "in float32\nhint: plan again for this workload"
            )
            raise UsageError(message)
        _require_products(model, dynamic)
        self._model, self._names, self._dynamic = model, names, dynamic

    def place(self) -> None:
        """Have these weights in 8 bits, and no others.

        Raises:
            UsageError: One cannot be quantised by now.
        """
        quantize(self._model, self._names, self._dynamic)


def _require_products(model: nn.Module, names: list[str]) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        weight = named[name]
        require_products(weight.device.type)
        if refusal := products_refusal(weight.shape, weight.device.type):
            message = f"the plan has `{name}` multiply in 8 bits, and {refusal}"
            raise UsageError(f"{message}\nhint: plan again for this workload")
