"""A joint graph as a trace of the engine, and the engine's answer as a decision.

Responsible for saying a joint graph in the words of ``crates/memfit-engine/src/trace``: what a
partition saves is what autograd would save, each read of a forward tensor in backward is one saved
tensor, inputs live throughout. So the planner of eager steps plans joint graphs too, by the same
definition of a dropped allocation. Not responsible for how the graph was read
(:mod:`memfit.run.compiled.joint`) nor for the document (:mod:`memfit.capture.trace_writer`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch

from memfit import _native
from memfit.capture.record.recorder import BACKWARD, FORWARD
from memfit.capture.trace_writer import Meta, TraceWriter
from memfit.run.compiled.inductor.op_costs import Cost
from memfit.run.compiled.inductor.rates import NOMINAL, Place
from memfit.run.compiled.joint import Joint, Op, Tensor
from memfit.run.compiled.schedule import Decision
from memfit.schema import Kind
from memfit.tensors.operators import operator_of
from memfit.torch_versions import size_hint

FORBIDDEN = tuple(kind for kind in get_args(Kind) if kind not in {"remat", "offload"})
"""Actions that a graph cannot take: they are of the step around it."""


def plan(
    joint: Joint, costs: Sequence[Cost], budget_bytes: int, place: Place | None = None
) -> Decision:
    """Let the engine decide what to drop, and what to have elsewhere if there is a place for it.

    Args:
        joint: The graph.
        costs: What its ops cost.
        budget_bytes: Peak that forward and backward of the graph should stay under.
        place: Where saved tensors may go.

    Returns:
        The decision, whether it fits or not.
    """
    trace, storage_of = trace_json(joint, costs)
    native = _native.Trace.from_json(json.dumps(trace).encode())
    request: dict[str, Any] = {"budget": str(max(budget_bytes, 1)), "forbid": list(FORBIDDEN)}
    rates = NOMINAL
    if place is not None:
        request["offload"], rates = place.offer(), place.rates
    made = _native.plan(native, rates.cost_source(), request)
    return decision_of(made, storage_of)


def decision_of(answer: Mapping[str, Any], storage_of: Mapping[tuple[int, int], int]) -> Decision:
    """A plan of the engine as a decision.

    Args:
        answer: The plan.
        storage_of: The storage that an op makes at a position among what it returns.

    Returns:
        The decision; empty for a plan that changes nothing.
    """
    dropped: set[int] = set()
    away: set[int] = set()
    homes: dict[int, int] = {}
    for action in answer["actions"]:
        for drop in (action.get("remat") or {}).get("drops", ()):
            storage = storage_of[drop["op"], drop["output"]]
            dropped.add(storage)
            if drop.get("home") is not None:
                homes[storage] = drop["home"]
        for store in (action.get("offload") or {}).get("stores", ()):
            away.add(storage_of[store["op"], store["output"]])
    return Decision(frozenset(dropped), homes, frozenset(away))


def trace_json(
    joint: Joint, costs: Sequence[Cost]
) -> tuple[dict[str, Any], dict[tuple[int, int], int]]:
    """Say a joint graph as a trace; storages and tensors keep their numbers.

    Args:
        joint: The graph.
        costs: What its ops cost.

    Returns:
        The trace, and the storage behind each op and position among what it returns.
    """
    writer = TraceWriter()
    for index, (op, cost) in enumerate(zip(joint.ops, costs, strict=True)):
        writer.op(
            _name(op),
            BACKWARD if op.backward else FORWARD,
            node=index if op.backward else None,
            reads=op.reads,
            outputs=op.returns,
            flops=cost.flops,
            moved_bytes=cost.moved_bytes,
            view=op.view,
            replayable=op.replayable,
            shape_only=_shape_only(op),
        )
    _allocations(writer, joint)
    for tensor in joint.tensors:
        shape, dtype = _shape_and_dtype(tensor)
        writer.value(tensor.storage, shape=shape, dtype=dtype)
    _saved(writer, joint)
    meta = Meta(
        target="joint graph",
        torch_version=torch.__version__,
        device_kind=joint.device_kind,
        optimizer="",
        batch=0,
        training=True,
        captured="joint",
        notes=[],
    )
    return writer.trace(meta), _storage_of(joint)


def _storage_of(joint: Joint) -> dict[tuple[int, int], int]:
    """Storages that forward makes, by the op and the position among what it returns."""
    return {
        (index, position): joint.tensors[tensor].storage
        for index, op in enumerate(joint.ops[: joint.forward_end])
        for position, tensor in enumerate(op.returns)
        if joint.tensors[tensor].fresh
    }


def _allocations(writer: TraceWriter, joint: Joint) -> None:
    """Add the storages; what autograd would hold for backward is not held by anything else."""
    device = writer.device(joint.device_kind)
    forward_end, step_end = joint.forward_end, len(joint.ops)
    read_in_backward: dict[int, int] = {}
    for index in range(forward_end, step_end):
        for tensor in joint.ops[index].reads:
            read_in_backward[joint.tensors[tensor].storage] = index
    returned = {joint.tensors[t].storage for t in joint.backward_outputs}
    for index, storage in enumerate(joint.storages):
        start, end = max(storage.op, 0), storage.last_forward + 1
        if storage.op < 0 or index in returned:
            end = step_end
        elif storage.leaves:
            end = forward_end if index in joint.released else step_end
        elif storage.op >= forward_end:
            end = read_in_backward.get(index, storage.op) + 1
        writer.allocation(
            storage.bytes,
            device=device,
            category="input" if storage.op < 0 else "activation",
            producer=storage.op if storage.op >= 0 else None,
            natural=[[start, max(end, start + 1)]],
        )


def _saved(writer: TraceWriter, joint: Joint) -> None:
    """Add each read of a tensor of forward in backward."""
    forward_end = joint.forward_end
    for index in range(forward_end, len(joint.ops)):
        for tensor in dict.fromkeys(joint.ops[index].reads):
            made = joint.tensors[tensor].op
            if 0 <= made < forward_end:
                writer.saved(tensor, node=index, pack=made + 1, unpack=index, release=index + 1)


def _shape_and_dtype(tensor: Tensor) -> tuple[list[int], torch.dtype]:
    """Sizes, symbolic ones by their hints, and element type; a node without a value is a scalar."""
    value = tensor.node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [size_hint(s, 1) for s in value.shape], value.dtype
    return [], torch.float32


def _name(op: Op) -> str:
    target = op.node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _shape_only(op: Op) -> bool:
    target = op.node.target
    return isinstance(target, torch._ops.OpOverload) and operator_of(target).shape_only
