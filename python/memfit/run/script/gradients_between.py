"""Gradients in mapped files between steps, where what runs there lacks room.

Once the optimizer has stepped, gradients mostly wait to be dropped, while the script evaluates,
saves or updates other models. Responsible for when they go, and for having those back that are
still there when the next pass begins. Not responsible for the mapping
(:mod:`memfit.run.script.held_in_files`).

Nobody knows what runs between steps before it has run: the first time they go, and whether that was
needed tells for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from memfit.run.script.held_in_files import exchange_memory, in_file, in_memory, may_go
from memfit.run.script.place import free_bytes, strays_to, takes_files
from memfit.run.script.request import FitRequest
from memfit.tensors.storage import gradient_of

_WORTH = 1 / 64
"""Part of the budget that is worth moving."""


class GradientsBetween:
    """The gradients of models between their steps."""

    def __init__(self, request: FitRequest) -> None:
        """Move nothing yet.

        Args:
            request: Where tensors may go.
        """
        self._request = request
        self._is_needed = "offload" not in request.options.forbid
        self._mapped: list[nn.Parameter] = []
        self._bytes = 0

    def step_ended(self, budget_bytes: int, models: Iterable[nn.Module]) -> None:
        """A step is complete: have its gradients in files.

        Args:
            budget_bytes: The budget.
            models: Those that are trained.
        """
        place = strays_to(self._request, "cpu") if self._is_needed else ""
        if self._mapped or not takes_files(place):
            return
        found = [it for model in models for it in model.parameters() if _gradient_may_go(it)]
        found = list(dict.fromkeys(found))
        gradients = [gradient for it in found if (gradient := gradient_of(it)) is not None]
        self._bytes = sum(it.nbytes for it in gradients)
        if not budget_bytes * _WORTH <= self._bytes <= free_bytes(place):
            return
        try:
            for parameter, gradient in zip(found, gradients, strict=True):
                exchange_memory(gradient, in_file(gradient.untyped_storage(), place))
                self._mapped.append(parameter)
        except (OSError, RuntimeError):
            self._is_needed = False  # the others stay

    def pass_begins(self, peak_bytes: int, budget_bytes: int) -> None:
        """The next pass is about to begin: have back what is still there.

        Args:
            peak_bytes: Most bytes live at once since the step ended.
            budget_bytes: The budget.
        """
        mapped, self._mapped = self._mapped, []
        if not mapped:
            return
        self._is_needed = self._is_needed and peak_bytes + self._bytes > budget_bytes
        for parameter in mapped:
            gradient = gradient_of(parameter)
            if gradient is not None and may_go(gradient, is_mapped=True) and _is_unseen(gradient):
                exchange_memory(gradient, in_memory(gradient.untyped_storage()))


def _gradient_may_go(parameter: nn.Parameter) -> bool:
    gradient = gradient_of(parameter) if parameter.requires_grad else None
    return gradient is not None and may_go(gradient)


def _is_unseen(gradient: Tensor) -> bool:
    """Whether no array of numpy, nor anybody else, holds a gradient beside its parameter."""
    return _references(gradient) <= _alone()


def _references(gradient: Tensor) -> int:
    return sys.getrefcount(gradient)


def _through(gradient: Tensor) -> int:
    return _references(gradient)  # through as many frames as in `_is_unseen`


@cache
def _alone() -> int:
    """References to a gradient that one variable of the caller holds, and its parameter."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradient = gradient_of(parameter)
    assert gradient is not None, "it was given one"
    return _through(gradient)
