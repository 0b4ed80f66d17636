"""What the ops of a recorded step usually take.

Responsible for telling that from one measurement of each. Not responsible for measuring
(:mod:`memfit.run.script.script_recorder`) nor for what a plan makes of it (the engine).
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median_low
from typing import Any

from memfit.run.script.script_recorder import ScriptRecorder

_SHAPE = 3
"""Where a value of the ledger begins to say how its tensor looks: shape, stride and type."""


def usual_seconds(recorder: ScriptRecorder) -> list[float]:
    """What each op takes: the middle of what those take that do the same to tensors alike.

    A first step is no usual one: the first of a kind takes longer, and whatever else the machine
    does falls on a few of them. A plan would then recompute what is dear, to spare what is not.

    Args:
        recorder: The recording.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    # A look is hashed once, not for each op that reads the value.
    looks = [numbers.setdefault(it[_SHAPE:], len(numbers)) for it in recorder.ledger.values]
    took: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    keys = []
    for op, seconds in zip(recorder.ops, recorder.seconds, strict=True):
        reads, outputs = (tuple([looks[value] for value in of]) for of in (op.reads, op.outputs))
        keys.append((op.operator.name, op.arguments, reads, outputs))
        took[keys[-1]].append(seconds)
    usual = {key: median_low(found) for key, found in took.items()}
    return [usual[key] for key in keys]
