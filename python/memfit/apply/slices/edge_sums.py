"""Sums of messages along edges into nodes, some edges at a time.

Responsible for the value and the gradients of ``sums.index_add(0, target, messages)``, and of rows
that are narrower than what they are made of, where the messages are made of node values by a
:class:`~memfit.apply.slices.edge_program.Program`: forward makes some messages and adds them up,
backward makes them again. Not responsible for which messages are put off
(:mod:`memfit.apply.slices.edges`).

Edges are added up in their order, so sums are as without. A gradient that is itself a sum over
edges is rounded as in another order of the same sum. Who differentiates the gradients has messages
made whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from memfit.apply.slices.edge_program import Program
from memfit.apply.slices.sliced_loss import slices_of
from memfit.apply.slices.writes import WATCHED


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Saved:
    """What a sum's backward needs; a write to it is seen before it happens.

    Attributes:
        context: The function's, which has it saved.
        tensors: Those of it that somebody may write to.
        copies: All of it, as it was before such a write; ``None`` without one.
    """

    context: ReferenceType[Any]
    tensors: list[ReferenceType[Tensor]]
    copies: list[Tensor] | None = None

    def made_of(self) -> Iterator[Tensor]:
        """What may be written to."""
        yield from (it for one in self.tensors if (it := one()) is not None)

    def make(self, _who: str) -> None:
        """Copy what is saved, as it is about to be written to: gathers do not save it at all."""
        context = self.context()
        if context is not None and self.copies is None:
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                self.copies = [it.clone() for it in context.saved_tensors]
        WATCHED.discard(self)


@dataclass(frozen=True, slots=True)
class Taken:
    """What becomes of the rows.

    Attributes:
        edges: How many there are.
        slices: Into how many slices they go, at most.
        in_place: Whether sums are added to the given ones; else to a copy.
        like: The whole rows without memory, where they are not summed.
        device: Where they are.
    """

    edges: int
    slices: int
    in_place: bool = False
    like: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def edge_sums(program: Program, taken: Taken, sums: Tensor | None, target: Tensor | None) -> Tensor:
    """Messages added up, or the rows themselves.

    Args:
        program: Makes messages.
        taken: What becomes of them.
        sums: What they are added to; ``None`` for rows.
        target: Where each goes; ``None`` for rows.
    """
    result: Tensor = _EdgeSums.apply(program, taken, target, sums, *program.given())
    return result


_BEFORE_TENSORS = 4
"""Arguments of the function before the program's tensors."""


class _EdgeSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        taken: Taken,
        target: Tensor | None,
        sums: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        if sums is None:
            assert taken.like is not None, "rows are like something"
            result = torch.empty(taken.like.shape, dtype=taken.like.dtype, device=taken.device)
        elif taken.in_place:
            ctx.mark_dirty(sums)
            result = sums
        else:
            result = sums.clone()
        for start, stop in slices_of(taken.edges, taken.slices):
            rows = program.rows(program.pieces(tensors, start, stop))
            if target is None:
                result.narrow(0, start, stop - start).copy_(rows)
            else:
                result.index_add_(0, target.narrow(0, start, stop - start), rows)
            del rows
        ctx.program, ctx.taken, ctx.saved = program, taken, None
        if any(ctx.needs_input_grad[_BEFORE_TENSORS:]):
            saved = [*tensors, target] if target is not None else [*tensors]
            ctx.save_for_backward(*saved)
            ctx.saved = _Saved(ref(ctx), [ref(it) for it in saved])
            WATCHED.add(ctx.saved)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[_BEFORE_TENSORS:]
        found: list[Tensor | None] = [None] * len(needs)
        if ctx.saved is not None:
            copies = ctx.saved.copies
            tensors = list(ctx.saved_tensors if copies is None else copies)
            target = tensors.pop() if len(tensors) > len(needs) else None
            make = _with_graph if torch.is_grad_enabled() else _in_slices
            found = make(ctx, gradient, tensors, target, needs)
        of_sums = gradient if ctx.needs_input_grad[_BEFORE_TENSORS - 1] else None
        return (None, None, None, of_sums, *found)


def _in_slices(
    ctx: Any,
    gradient: Tensor,
    tensors: list[Tensor],
    target: Tensor | None,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients of the program's tensors, from messages that are made again."""
    program: Program = ctx.program
    found: list[Tensor | None] = [None] * len(tensors)
    wanted = [number for number, use in enumerate(program.uses) if needs[use.place]]
    for start, stop in slices_of(ctx.taken.edges, ctx.taken.slices):
        pieces = [it.detach() for it in program.pieces(tensors, start, stop)]
        given = [pieces[number].requires_grad_() for number in wanted]
        with torch.enable_grad():
            rows = program.rows(pieces)
        of_rows = (
            gradient.narrow(0, start, stop - start)
            if target is None
            else gradient.index_select(0, target.narrow(0, start, stop - start))
        )
        made = torch.autograd.grad(rows, given, of_rows, allow_unused=True)
        del rows, of_rows, given
        for number, of_piece in zip(wanted, made, strict=True):
            if of_piece is not None:
                program.add_gradient(program.uses[number], of_piece, tensors, found, start)
        del made
    return found


def _with_graph(
    ctx: Any,
    gradient: Tensor,
    tensors: list[Tensor],
    target: Tensor | None,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """The same from whole messages, to be differentiated."""
    program: Program = ctx.program
    # One of the tensors may be made of another: each has its own gradient alone.
    given = [it.view_as(it) if need else it for it, need in zip(tensors, needs, strict=True)]
    rows = program.rows(program.pieces(given, 0, ctx.taken.edges))
    of_rows = gradient if target is None else gradient.index_select(0, target)
    wanted = [it for it, need in zip(given, needs, strict=True) if need]
    made = iter(torch.autograd.grad(rows, wanted, of_rows, create_graph=True, allow_unused=True))
    return [next(made) if need else None for need in needs]
