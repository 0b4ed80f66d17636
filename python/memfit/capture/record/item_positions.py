"""Whether a step tells how many items are in its batch, or which position one has in it.

An item computes the same in a piece of its batch only if no op knows the size of the batch, as in
``hidden / len(batch)``, or the position of an item, as in ``hidden + torch.arange(len(batch))``.
Responsible for telling both from two recordings at different batch sizes. Not responsible for ops
that mix items (the engine's ``trace/batch.rs``) nor for how a loss reduces over the batch
(:mod:`memfit.capture.record.step_loss`).

An argument that is a size may differ between the recordings: shapes of views and of new tensors.
What is made with an entry for each item, and not from the batch, is the same for every item only
where one value fills it or is repeated in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_FORWARD = "forward"

_SIZE = re.compile(r"SymInt\S* (\w+)")
"""An argument that may be a size, in the text of an operator's schema."""

_NO_SIZES = frozenset({"shifts", "index", "k", "high", "low", "value", "correction", "minlength"})
"""Arguments of that type which are something else."""

_COUNTING = frozenset({"arange", "range"})
"""Ops that make the numbers of places: their bounds count as sizes."""

_ALIKE = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "expand", "expand_as", "full", "full_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones"),
        *("ones_like", "repeat", "zeros", "zeros_like", "_efficientzerotensor", "zero", "fill"),
    }
)
"""Ops whose result is the same for every item, whatever is not of the batch that they are given."""

_SAME_PLACES = frozenset(
    {
        *("_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "detach", "expand"),
        *("lift_fresh", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view"),
    }
)
"""Ops that hand on what they are given."""


def size_or_place_used(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Why an item may compute something else in a piece of its batch, as a clause.

    Args:
        first: A recorded step, as JSON.
        second: The same step at another batch size; where its ops are others, there is no answer.
    """
    known: set[int] = set()  # of the first's values: those that tell the size, or places
    for op in _forward(first, second):
        if op.is_random:
            continue
        of_batch = any(op.reads_batched) or any(op.writes_batched)
        told = any(value in known for value in op.reads)
        differs = op.base not in _COUNTING and op.differs()
        if differs and op.is_made_for_many:
            return f"`{op.name}` computes with the size of the batch"
        if op.base == "index" and told and op.reads[0] not in known and op.reads_batched[0]:
            continue  # each item picks by its own place: whether in order, the engine asks
        if told and of_batch and op.is_made_for_many and not _only(op, known):
            return f"`{op.name}` computes with the size of the batch, or with an item's place in it"
        is_new = not of_batch and op.is_made_batched and op.base not in _ALIKE
        if differs or told or is_new:
            known.update(op.outputs)
    return None


def _only(op: _Op, known: set[int]) -> bool:
    """Whether an op hands on what tells places, and nothing of the batch's own."""
    return op.base in _SAME_PLACES and all(value in known for value in op.reads)


@dataclass(slots=True)
class _Op:
    """An op in both recordings.

    Attributes:
        name: Its name.
        arguments: Its arguments in each, as text.
        reads: Values that it reads in the first.
        reads_batched: Which of them differ in shape.
        writes_batched: The same of what it writes.
        outputs: Values that it makes in the first.
        is_made_batched: Whether one of those differs in shape.
        is_made_for_many: Whether one of those has more than one entry.
        is_random: Whether it draws random numbers.
    """

    name: str
    arguments: tuple[str, str]
    reads: list[int]
    reads_batched: list[bool]
    writes_batched: list[bool]
    outputs: list[int]
    is_made_batched: bool
    is_made_for_many: bool
    is_random: bool

    @property
    def base(self) -> str:
        """Its name without a namespace, an overload, or a mark that it writes."""
        parts = self.name.split(".")
        return parts[1 if len(parts) > 1 else 0].rstrip("_")

    def differs(self) -> bool:
        """Whether arguments differ that are no sizes, or sizes of what has no entry for each."""
        one, other = self.arguments
        if one == other:
            return False
        sizes = _sizes(self.name)
        return not self.is_made_batched or _others(one, sizes) != _others(other, sizes)


def _forward(first: dict[str, Any], second: dict[str, Any]) -> Iterator[_Op]:
    for a, b in zip(first["ops"], second["ops"], strict=False):
        name, other = (it["strings"][op["name"]] for it, op in ((first, a), (second, b)))
        if a["phase"] != _FORWARD or name != other:
            return

        def differ(kind: str, a: dict[str, Any] = a, b: dict[str, Any] = b) -> list[bool]:
            return [
                first["values"][u]["shape"] != second["values"][v]["shape"]
                for u, v in zip(a[kind], b[kind], strict=False)
            ]

        shapes = [first["values"][value]["shape"] for value in a["outputs"]]
        yield _Op(
            name,
            (first["strings"][a["arguments"]], second["strings"][b["arguments"]]),
            a["reads"],
            differ("reads"),
            differ("writes"),
            a["outputs"],
            any(differ("outputs")),
            any(torch.Size(shape).numel() > 1 for shape in shapes),
            a["random"],
        )


def _others(arguments: str, sizes: frozenset[str]) -> list[str]:
    parts = filter(None, arguments.split(", "))
    return [part for part in parts if part.partition("=")[0] not in sizes]


@cache
def _sizes(name: str) -> frozenset[str]:
    """Arguments of an op that are sizes; none of an op that torch does not know."""
    try:
        namespace, packet, overload = name.split(".")
        schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
    except (AttributeError, ValueError):
        return frozenset()
    return frozenset(_SIZE.findall(str(schema))) - _NO_SIZES
