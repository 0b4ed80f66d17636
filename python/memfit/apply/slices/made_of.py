"""The node of autograd's that makes a tensor which stands for others.

A function of autograd's own, as a script's, takes such a tensor without asking for what it stands
for, and autograd sees it alone. Its gradient goes on from here, also where it is asked for by
``torch.autograd.grad``, which runs no hook and leaves no gradient on the way. Responsible for that
node. Not responsible for what it stands for (:mod:`memfit.apply.slices.deferred`,
:mod:`memfit.apply.slices.edges`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def made_of(
    make: Callable[[], Tensor], real: Callable[[], Tensor | None], given: list[Tensor]
) -> Any:
    """A tensor that stands for another, in the graph of what that is made of.

    Args:
        make: Makes it, without a graph.
        real: What it stands for, once something took it for a tensor; it may not hold it.
        given: What that is made of.
    """
    with torch._C.DisableTorchFunction():
        return _MadeOf.apply(make, real, *given)


_BEFORE_TENSORS = 2
"""Arguments of the function before what is given."""


class _MadeOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Tensor], real: Callable[[], Tensor | None], *given: Tensor
    ) -> Tensor:
        ctx.real, ctx.given = real, given
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        real = ctx.real()
        assert real is not None, "it was made when something took it"
        needs = ctx.needs_input_grad[_BEFORE_TENSORS:]
        if not real.requires_grad:  # as what a comparison chose from constants
            return (None,) * (_BEFORE_TENSORS + len(needs))
        wanted = [it for it, need in zip(ctx.given, needs, strict=True) if need]
        made = torch.autograd.grad(
            real,
            wanted,
            gradient,
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        if all(it is None for it in made):
            raise RuntimeError("what stands for a tensor is not made of what it was to be made of")
        found = iter(made)
        return (None,) * _BEFORE_TENSORS + tuple(next(found) if it else None for it in needs)
