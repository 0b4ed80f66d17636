"""How the loss of a recorded step reduces over the batch, followed back from its value.

Not responsible for what a single call does to its elements
(:mod:`memfit.capture.record.loss_reduction`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memfit.capture.record.recorder import FORWARD, Recorder

_COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})
_SCALINGS = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"})
_SUMS = frozenset({"aten.add.Tensor"})
_DEEPEST_LOSS = 32


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a loss reduces over the batch.

    Attributes:
        kind: ``mean``, ``sum``, ``token_mean``, or empty when it was not recognised.
        elements: Number of elements it reduces; in proportion to the batch for a true reduction
            over examples, which two batch sizes can tell.
    """

    kind: str = ""
    elements: int = 0


def loss_reduction(recorder: Recorder, loss: int | None, batch: int) -> Reduction:
    """How the loss reduces over the batch, followed back from its value.

    Args:
        recorder: The recorder after the step.
        loss: Value of the loss, or ``None``.
        batch: Batch size; 0 when there is none.

    Returns:
        The reduction.
    """
    if loss is None or batch <= 0:
        return Reduction()
    producers: dict[int, int] = {}
    for index, op in enumerate(recorder.ops):
        if op.phase != FORWARD:
            break
        for value in (*op.outputs, *op.writes):
            producers[value] = index
    return _follow(loss, recorder, batch, producers, depth=0)


def _follow(
    value: int, recorder: Recorder, batch: int, producers: dict[int, int], depth: int
) -> Reduction:
    index = producers.get(value)
    if index is None or depth > _DEEPEST_LOSS:
        return Reduction()
    op = recorder.ops[index]
    found = recorder.reductions.get(index)
    if found is not None:
        elements = math.prod(recorder.ledger.values[op.reads[0]][3])
        whole = elements >= batch and elements % batch == 0
        return Reduction(found, elements) if whole else Reduction()
    name = op.operator.name
    if op.view or (name in _COPIES and len(op.reads) == 1):
        return _follow(op.reads[0], recorder, batch, producers, depth + 1)
    if name in _SCALINGS and len(op.reads) == 1 and not _may_be_batch(op.arguments, batch):
        reduction = _follow(op.reads[0], recorder, batch, producers, depth + 1)
        return reduction if reduction.kind != "sum" else Reduction()
    if name in _SUMS and len(op.reads) == 2:  # noqa: PLR2004 - both terms are tensors
        terms = [_follow(read, recorder, batch, producers, depth + 1) for read in op.reads]
        same = terms[0].kind == terms[1].kind
        return Reduction(terms[0].kind, sum(t.elements for t in terms)) if same else Reduction()
    return Reduction()


def _may_be_batch(arguments: str, batch: int) -> bool:
    """Whether the factor of a scaling may have been computed from the batch size."""
    try:
        factor = abs(float(arguments.split(",", maxsplit=1)[0].partition("=")[2]))
    except ValueError:
        return True
    if factor == 0.0 or batch == 1:
        return True
    return any((candidate / batch).is_integer() for candidate in (factor, 1.0 / factor))
