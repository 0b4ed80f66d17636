"""Cross entropy over many classes in slices of rows, so that whole logits never exist.

Responsible for the value and the gradients of
``cross_entropy(linear(hidden, weight, bias), target)``, with every option of torch's. Not
responsible for finding such a loss in a model (:mod:`memfit.apply.slices.deferred`).

Where the loss is one number, its gradients are known but for a factor as soon as a slice's logits
are there. They are computed at once, so no logits are computed twice: the hidden values' gradient
takes the place of saved hidden values, and the weight's would exist right after forward anyway.
Where each row has a loss of its own, or the logits are of a type whose range needs the loss scale,
backward computes each slice again. Sums over slices are kept in 32 bits at least. Who
differentiates the gradients needs whole logits, and the values that they were computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memfit.apply.slices.gradient_looks import Way


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How a loss is computed.

    Attributes:
        slices: Into how many slices of rows, at most.
        dtype: Element type of the loss.
        reduction: As in ``F.cross_entropy``.
        ignore_index: As in ``F.cross_entropy``.
        label_smoothing: As in ``F.cross_entropy``.
        twice: Whether its gradients may be differentiated.
    """

    slices: int
    dtype: torch.dtype
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    twice: bool = False


def sliced_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    called_with: Tensor | None = None,
    way: Way | None = None,
) -> Tensor:
    """The loss of ``linear(hidden, weight, bias)``.

    Args:
        hidden: Rows of features, in the type the logits are computed in.
        weight: A row of features for each class, in any type.
        bias: A number for each class, or ``None``.
        target: The class of each row.
        class_weight: As ``weight`` in ``F.cross_entropy``.
        options: How to compute it.
        called_with: What the linear layer was called with, of which ``hidden`` is made.
        way: How the loss follows from the layer's result, if somebody looks at gradients of that.

    Returns:
        The loss, with a graph where any argument needs one.
    """
    others = (target, class_weight, options, torch.is_grad_enabled(), called_with, way)
    result: Tensor = _SlicedLoss.apply(hidden, weight, bias, *others)
    return result


_CALLED_WITH = 7
"""The place of that argument of the function."""


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        options: LossOptions,
        grad_enabled: bool,  # noqa: FBT001 - arguments of a function are positional
        called_with: Tensor | None,  # noqa: ARG004 - backward has a gradient of it
        way: Way | None,
    ) -> Tensor:
        needs = tuple(n and grad_enabled for n in ctx.needs_input_grad[:3])
        head = _Head.of(hidden, weight, bias)
        rows = _Rows.of(target, class_weight, options, head.wide)
        at_once = options.reduction != "none" and hidden.dtype is not torch.float16
        gradients = _Gradients(head, needs) if any(needs) and at_once else None
        losses = []
        for start, stop in slices_of(len(hidden), options.slices):
            log_probabilities = head.log_probabilities(start, stop)
            losses.append(rows.losses(log_probabilities, start, stop))
            if gradients is not None:
                scale = rows.scale[start:stop]
                gradients.add(rows.logit_gradient(log_probabilities, start, stop, scale), start)
            del log_probabilities
        ctx.options, ctx.way = options, way
        ctx.gradients = gradients
        if any(needs) and (gradients is None or options.twice):
            ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        per_row = torch.cat(losses) if losses else rows.scale
        return rows.reduced(per_row).to(options.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.way is not None and ctx.way.is_looked_at:
            return _through_logits(ctx, gradient)
        if torch.is_grad_enabled() and ctx.options.twice:
            made = _with_graph(ctx, gradient)
        else:
            made = _once(ctx, gradient)
        return (*made, None, None, None, None, None, None)


def _through_logits(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients where somebody looks at those of the logits, which are whole by now."""
    needs = (ctx.needs_input_grad[_CALLED_WITH], *ctx.needs_input_grad[1:3])
    of_input, of_weight, of_bias = ctx.way.gradients(
        gradient, needs, creates_graph=torch.is_grad_enabled()
    )
    return (None, of_weight, of_bias, None, None, None, None, of_input, None)


@once_differentiable
def _once(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients, without a graph of their own."""
    gradients: _Gradients | None = ctx.gradients
    if gradients is None:
        return _again(ctx, gradient)
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return gradients.times(gradient)
    ctx.gradients = None
    return gradients.taken(gradient)


def _with_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by torch's own loss of whole logits, to be differentiated."""
    hidden, weight, bias, target, class_weight = ctx.saved_tensors
    options: LossOptions = ctx.options
    head = _Head.of(hidden, weight, bias)
    loss = F.cross_entropy(
        F.linear(hidden, head.weight, head.bias).to(options.dtype),
        target.long(),
        class_weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    given = (hidden, weight, bias)
    wanted = [it for it, needs in zip(given, ctx.needs_input_grad[:3], strict=True) if needs]
    made = iter(torch.autograd.grad(loss, wanted, gradient, create_graph=True))
    return tuple(next(made) if needs else None for needs in ctx.needs_input_grad[:3])


def _again(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients from logits that are computed again."""
    hidden, weight, bias, target, class_weight = ctx.saved_tensors
    head = _Head.of(hidden, weight, bias)
    rows = _Rows.of(target, class_weight, ctx.options, head.wide)
    scale = rows.scale * gradient.to(head.wide)
    gradients = _Gradients(head, ctx.needs_input_grad[:3])
    for start, stop in slices_of(len(hidden), ctx.options.slices):
        log_probabilities = head.log_probabilities(start, stop)
        part = rows.logit_gradient(log_probabilities, start, stop, scale[start:stop])
        del log_probabilities
        gradients.add(part, start)
        del part
    return gradients.result()


_CLASS_BLOCKS = 4
"""Blocks of classes in which products of 16 bits are added up."""


def slices_of(rows: int, slices: int) -> Iterator[tuple[int, int]]:
    """Where each slice starts and ends; all but the last are of one size."""
    size = max(-(-rows // max(slices, 1)), 1)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


@dataclass(slots=True)
class _Head:
    """The linear layer.

    Attributes:
        hidden: Its input.
        weight: Its weight, in the type of the input.
        bias: Its bias, in that type.
        given: Weight and bias as they were given.
        wide: The type losses and sums are computed in.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    given: tuple[Tensor, Tensor | None]
    wide: torch.dtype

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Head:
        dtype = hidden.dtype
        wide = dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
        cast = bias.to(dtype) if bias is not None else None
        return _Head(hidden, weight.to(dtype), cast, (weight, bias), wide)

    def log_probabilities(self, start: int, stop: int) -> Tensor:
        logits = F.linear(self.hidden[start:stop], self.weight, self.bias)
        return torch.log_softmax(logits, -1, dtype=self.wide)


@dataclass(slots=True)
class _Rows:
    """What is known of each row before its logits.

    Attributes:
        target: Its class; any where it is ignored.
        own: Weight of its class in the loss; 0 where it is ignored.
        scale: What its loss is multiplied by in the result; 0 where it is ignored.
        options: How the loss is computed.
        spread: Weight of every class, for smoothed labels.
    """

    target: Tensor
    own: Tensor
    scale: Tensor
    options: LossOptions
    spread: Tensor | None

    @staticmethod
    def of(
        target: Tensor, class_weight: Tensor | None, options: LossOptions, wide: torch.dtype
    ) -> _Rows:
        ignored = target == options.ignore_index
        target = target.long().masked_fill(ignored, 0)
        if class_weight is None:
            own = ignored.logical_not().to(wide)
        else:
            own = class_weight.to(wide)[target].masked_fill(ignored, 0)
        scale = torch.ones_like(own)
        if options.reduction == "mean":
            scale = scale / own.sum()
        spread = class_weight.to(wide) if class_weight is not None else None
        return _Rows(target, own, scale.masked_fill(ignored, 0), options, spread)

    def losses(self, log_probabilities: Tensor, start: int, stop: int) -> Tensor:
        """The loss of each row of a slice; 0 where it is ignored."""
        smoothing = self.options.label_smoothing
        target, own = self.target[start:stop], self.own[start:stop]
        picked = log_probabilities.gather(1, target.unsqueeze(1)).squeeze(1)
        # An ignored row may hold no number at all, and its loss is still 0.
        loss = (picked * -own).masked_fill(own == 0, 0)
        if smoothing == 0:
            return loss
        if self.spread is None:
            whole = log_probabilities.sum(1)
        else:
            whole = torch.mv(log_probabilities, self.spread)
        ignored = self.scale[start:stop] == 0
        whole = whole.masked_fill(ignored, 0)
        return loss * (1 - smoothing) - whole * (smoothing / log_probabilities.shape[1])

    def logit_gradient(
        self, log_probabilities: Tensor, start: int, stop: int, scale: Tensor
    ) -> Tensor:
        """The gradient of a slice's logits, in place of their logarithms of probabilities."""
        smoothing = self.options.label_smoothing
        hit = self.own[start:stop] * scale * (1 - smoothing)
        gradient = log_probabilities.exp_()
        if smoothing == 0:
            gradient.mul_(hit.unsqueeze(1))
        else:
            classes = gradient.shape[1]
            each = scale * (smoothing / classes)
            total = float(classes) if self.spread is None else self.spread.sum()
            gradient.mul_((hit + each * total).unsqueeze(1))
            if self.spread is None:
                gradient.sub_(each.unsqueeze(1))
            else:
                gradient.addr_(each, self.spread, alpha=-1)
        return gradient.scatter_add_(1, self.target[start:stop].unsqueeze(1), -hit.unsqueeze(1))

    def reduced(self, losses: Tensor) -> Tensor:
        """The loss as asked for."""
        if self.options.reduction == "mean":
            return losses.sum() / self.own.sum()
        return losses.sum() if self.options.reduction == "sum" else losses


class _Gradients:
    """Gradients of input, weight and bias, summed over slices."""

    def __init__(self, head: _Head, needs: tuple[bool, ...]) -> None:
        self._head = head
        weight, bias = head.given
        self._dtypes = (head.hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        self._hidden = torch.empty_like(head.hidden) if needs[0] else None
        self._weight = torch.zeros_like(weight, dtype=head.wide) if needs[1] else None
        self._bias = (
            torch.zeros_like(bias, dtype=head.wide) if needs[2] and bias is not None else None
        )

    def add(self, gradient: Tensor, start: int) -> None:
        """Take in the gradient of a slice's logits."""
        head = self._head
        stop = start + len(gradient)
        if self._bias is not None:
            self._bias += gradient.sum(0)
        gradient = gradient.to(head.hidden.dtype)
        if self._hidden is not None:
            torch.mm(gradient, head.weight, out=self._hidden[start:stop])
        if self._weight is not None:
            if gradient.dtype is self._weight.dtype:
                self._weight.addmm_(gradient.t(), head.hidden[start:stop])
            else:
                self._add_narrow(gradient, head.hidden[start:stop])

    def _add_narrow(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add a product of 16 bits to a sum of more, some classes at a time: each needs copies."""
        assert self._weight is not None
        for first, last in slices_of(len(self._weight), _CLASS_BLOCKS):
            part = gradient[:, first:last].t() @ hidden
            self._weight[first:last].add_(part.to(self._weight.dtype))

    def result(self) -> tuple[Tensor | None, ...]:
        """The gradients, each in the type of what it is the gradient of."""
        sums = (self._hidden, self._weight, self._bias)
        return tuple(
            s.to(dtype) if s is not None else None
            for s, dtype in zip(sums, self._dtypes, strict=True)
        )

    def times(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients times a number, for a graph that is kept."""
        sums = (self._hidden, self._weight, self._bias)
        return tuple(
            (s * factor.to(s.dtype)).to(dtype) if s is not None else None
            for s, dtype in zip(sums, self._dtypes, strict=True)
        )

    def taken(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """The same in place; nothing can be asked for after this."""
        for s in (self._hidden, self._weight, self._bias):
            if s is not None:
                s.mul_(factor.to(s.dtype))
        made = self.result()
        self._hidden = self._weight = self._bias = None
        return made
