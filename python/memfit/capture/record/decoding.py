"""Decoding that goes on: what transformers' ``generate`` asks of tokens that nobody knows.

Responsible for the one question whose answer decides how long ``generate`` runs: whether a token
that the model chose ends its sequence. On fakes nobody knows. Decoding that no such token ends
takes the most memory, as it reaches the greatest length, which ``generate`` knows by itself; so
that is the answer, and the trace says so. Not responsible for loops that users write: what they
compare may send them down a branch that a real step does not take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.tensors.operators import Operator

NOTE = "decoding was taken to reach its greatest length: no sequence ends before"
"""What the reader of such a trace should know."""

_FILE = "transformers/generation/stopping_criteria.py:"


def may_ask_for_end(operator: Operator) -> bool:
    """Whether an op may compare tokens with those that end a sequence; most ops do not."""
    return operator.name.startswith("aten.isin.")


def asks_for_end(source: str) -> bool:
    """Whether such an op does, by the line that called it: one of transformers' criteria.

    Args:
        source: ``file:line``.
    """
    return source.startswith(_FILE)


def none_ends(answer: Tensor) -> Tensor:
    """The answer that takes the most memory, as a real tensor.

    Args:
        answer: The fake that the comparison returned.
    """
    with torch._C._DisableTorchDispatch():
        return torch.zeros(tuple(answer.shape), dtype=torch.bool)
