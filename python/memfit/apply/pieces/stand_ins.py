"""Parameters of a module that collect gradients by themselves.

Responsible for putting a parameter that shares the memory in the place of each one that trains, and
for taking it out again. What several backwards add up in a stand-in reaches the parameter's own
gradient, its hooks and its optimizer once, as the gradient of one backward. Not responsible for
those backwards (:mod:`memfit.apply.pieces.call`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def stand_ins(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Have a module compute with stand-ins, inside this.

    Args:
        module: The module, with those inside it.

    Yields:
        The stand-in of each parameter that trains, by the parameter's ``id``.
    """
    made: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    flat: list[tuple[nn.RNNBase, list[Any]]] = []
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter.requires_grad:
                if id(parameter) not in made:
                    with torch._C._DisableTorchDispatch():  # it is no op of the step
                        made[id(parameter)] = nn.Parameter(parameter.detach())
                replaced.append((inner, name, parameter))
        if isinstance(inner, nn.RNNBase):  # it holds them once more, in a list
            flat.append((inner, inner._flat_weights))
    try:
        for inner, name, parameter in replaced:
            inner._parameters[name] = made[id(parameter)]
        for recurrent, weights in flat:
            recurrent.__dict__["_flat_weights"] = [made.get(id(it), it) for it in weights]
        yield made
    finally:
        for inner, name, parameter in replaced:
            inner._parameters[name] = parameter
        for recurrent, weights in flat:
            recurrent.__dict__["_flat_weights"] = weights
