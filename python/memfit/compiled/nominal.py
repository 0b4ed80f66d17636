"""What the ops of a joint graph cost, by the rates of a plain core and as Inductor runs them.

Responsible for nominal costs, which only rank what to compute again. They are fixed, so that a plan
does not depend on when a machine was measured: caches of compiled code hold on to plans. Not
responsible for what Inductor fuses (:mod:`memfit.compiled.fusion`).

Elementwise results that are computed inside their readers cost their arithmetic alone: to compute
an activation again from a normalisation's input moves two tensors, however many ops lie between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from memfit.compiled.as_loops import Loops
from memfit.compiled.fusion import Kind, moved_bytes, op_name
from memfit.compiled.joint import Joint, Op

_FLOPS_PER_SECOND = 1e11
_BYTES_PER_SECOND = 2e10
_OP_SECONDS = 1e-6

COSTS = json.dumps(
    {
        "kind": "roofline",
        "profile": {
            "name": "nominal",
            "flops_per_second": {"float32": _FLOPS_PER_SECOND},
            "bytes_per_second": _BYTES_PER_SECOND,
            "op_overhead_seconds": _OP_SECONDS,
        },
    }
)
"""The rates as a cost source of the engine."""

_FUNCTIONS = frozenset(
    [
        "exp",
        "expm1",
        "log",
        "log1p",
        "log10",
        "sigmoid",
        "silu",
        "tanh",
        "erf",
        "erfc",
        "gelu",
        "sin",
        "cos",
        "inductor_random",
    ]
)
"""Elementwise ops that take a polynomial or many rounds for each element."""

_FLOPS_OF_FUNCTION = 100
"""Nominal operations for an element of one: about a nanosecond, as vectorized code takes."""


@dataclass(slots=True, frozen=True)
class Cost:
    """What an op costs.

    Attributes:
        flops: Floating-point operations.
        moved_bytes: Bytes read from memory and written to it.
        seconds: Nominal time.
    """

    flops: int
    moved_bytes: int
    seconds: float


def costs(joint: Joint) -> list[Cost]:
    """The cost of each op.

    Args:
        joint: The graph.
    """
    moved = _moved_bytes(joint)
    return [_cost(op, bytes_) for op, bytes_ in zip(joint.ops, moved, strict=True)]


def _cost(op: Op, moved: int) -> Cost:
    if op.view:
        return Cost(0, 0, 0.0)
    flops = op.flops
    if op.loop.kind is not Kind.EXTERN and op_name(op.node) in _FUNCTIONS:
        flops += _FLOPS_OF_FUNCTION * op.loop.extent
    if moved == 0 and flops == 0:
        return Cost(0, 0, 0.0)
    seconds = max(flops / _FLOPS_PER_SECOND, moved / _BYTES_PER_SECOND) + _OP_SECONDS
    return Cost(flops, moved, seconds)


def _moved_bytes(joint: Joint) -> list[int]:
    """What each op moves where it runs again, for backward; libraries move all they see."""
    loops = Loops(joint, ())
    for index, op in enumerate(joint.ops):
        loops.run(index, [_source(joint, tensor) for tensor in op.reads])
    for tensor in (*joint.forward_outputs, *joint.backward_outputs):
        loops.returns(tensor, _source(joint, tensor))
    for result in loops.results:
        # What forward wants of it, forward computes for itself.
        again = {reader for reader in result.readers if joint.ops[reader].backward}
        result.readers = again or result.readers
    fused = moved_bytes(loops.calls, loops.results)
    return [
        op.moved_bytes if op.loop.kind is Kind.EXTERN else bytes_
        for op, bytes_ in zip(joint.ops, fused, strict=True)
    ]


def _source(joint: Joint, tensor: int) -> int | None:
    made = joint.tensors[tensor].op
    return made if made >= 0 else None
