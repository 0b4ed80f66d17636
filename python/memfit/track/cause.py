"""Why a loop keeps more and more: the type, which whoever finds out fills."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Cause:
    """What keeps more and more memory alive.

    Attributes:
        kind: ``summed_graph``, ``kept_graphs``, ``kept_tensors``, ``exceptions``,
            ``longer_tensor``, ``new_parameters``, ``optimizer_state``, ``ctx_cycle``,
            ``gradient_cycle``, ``hook_cycle`` or ``unknown``.
        message: One sentence.
        advice: What to do.
    """

    kind: str
    message: str
    advice: str
