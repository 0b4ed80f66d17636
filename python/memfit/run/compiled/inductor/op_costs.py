"""What the ops of a joint graph cost as Inductor runs them.

Responsible for nominal costs, which rank what to compute again and are held against transfers. Not
responsible for rates (:mod:`memfit.run.compiled.inductor.rates`) or for what Inductor fuses
(:mod:`memfit.run.compiled.inductor.fusion`).

Elementwise results that are computed inside their readers cost their arithmetic alone: to compute
an activation again from a normalisation's input moves two tensors, however many ops lie between.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.run.compiled.inductor.fusion import Kind, moved_bytes, op_name
from memfit.run.compiled.inductor.loops import Loops
from memfit.run.compiled.inductor.rates import NOMINAL, OP_SECONDS, Rates
from memfit.run.compiled.joint import Joint, Op

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


def costs(joint: Joint, rates: Rates = NOMINAL) -> list[Cost]:
    """The cost of each op.

    Args:
        joint: The graph.
        rates: How fast the device is.
    """
    moved = _moved_bytes(joint)
    return [_cost(op, bytes_, rates) for op, bytes_ in zip(joint.ops, moved, strict=True)]


def _cost(op: Op, moved: int, rates: Rates) -> Cost:
    if op.view:
        return Cost(0, 0, 0.0)
    flops = op.flops
    if op.loop.kind is not Kind.EXTERN and op_name(op.node) in _FUNCTIONS:
        flops += _FLOPS_OF_FUNCTION * op.loop.extent
    if moved == 0 and flops == 0:
        return Cost(0, 0, 0.0)
    seconds = max(flops / rates.flops(_dtype(op)), moved / rates.bytes_per_second)
    return Cost(flops, moved, seconds + OP_SECONDS)


def _dtype(op: Op) -> str:
    """The type that an op computes in: that of its first result, as in the engine."""
    value = op.node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return str(getattr(first, "dtype", "")).removeprefix("torch.")


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
