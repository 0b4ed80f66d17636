"""A joint graph as a trace of the engine, and the engine's answer as a decision.

Responsible for saying a joint graph in the words of ``crates/memfit-engine/src/trace``: what a
partition saves is what autograd would save, each read of a forward tensor in backward is one saved
tensor, inputs live throughout. So the planner of eager steps plans joint graphs too, by the same
definition of a dropped allocation. Not responsible for how the graph was read
(:mod:`memfit.run.compiled.joint`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit import _native
from memfit.run.compiled.inductor.op_costs import Cost
from memfit.run.compiled.inductor.rates import NOMINAL, Place
from memfit.run.compiled.joint import Joint, Op
from memfit.run.compiled.schedule import Decision
from memfit.tensors.operators import operator_of
from memfit.torch_versions import size_hint

FORBIDDEN = (
    "fuse_optimizer",
    "micro_batch",
    "allocator_settings",
    "offload_optimizer",
    "offload_parameters",
    "chunk",
)
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
    made = _native.plan(native, rates.cost_source(), json.dumps(request))
    answer: dict[str, Any] = json.loads(made)
    return decision_of(answer, storage_of)


def decision_of(answer: Mapping[str, Any], storage_of: Mapping[tuple[int, int], int]) -> Decision:
    """A plan of the engine as a decision.

    Args:
        answer: The plan as parsed JSON.
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
    """Say a joint graph as a trace.

    Args:
        joint: The graph.
        costs: What its ops cost.

    Returns:
        The trace, and the storage behind each op and position among what it returns.
    """
    writer = _Writer(joint, costs)
    return writer.trace(), writer.storage_of


class _Writer:
    """Builds the JSON of a trace; storages and tensors keep their numbers."""

    def __init__(self, joint: Joint, costs: Sequence[Cost]) -> None:
        self._joint = joint
        self._costs = costs
        self._strings = [""]
        self._ids = {"": 0}
        self._end = len(joint.ops)
        self._forward_end = joint.forward_end
        self.storage_of: dict[tuple[int, int], int] = {}
        for index, op in enumerate(joint.ops[: self._forward_end]):
            for position, tensor in enumerate(op.returns):
                if joint.tensors[tensor].fresh:
                    self.storage_of[index, position] = joint.tensors[tensor].storage

    def _id(self, text: str) -> int:
        found = self._ids.get(text)
        if found is None:
            found = self._ids[text] = len(self._strings)
            self._strings.append(text)
        return found

    def trace(self) -> dict[str, Any]:
        joint = self._joint
        ops = [self._op(index, op) for index, op in enumerate(joint.ops)]
        device = joint.device_kind
        return {
            "meta": {
                "target": "joint graph",
                "torch_version": torch.__version__,
                "device_kind": device,
                "optimizer": "",
                "batch": 0,
                "training": True,
                "captured": "joint",
                "notes": [],
            },
            "allocations": self._allocations(),
            "devices": [device],
            "values": [self._value(index) for index in range(len(joint.tensors))],
            "ops": ops,
            "saved": self._saved(),
            "regions": [],
            "updates": [],
            "strings": self._strings,
            "couplings": None,
        }

    def _op(self, index: int, op: Op) -> dict[str, Any]:
        return {
            "name": self._id(_name(op)),
            "phase": "backward" if op.backward else "forward",
            "module": 0,
            "source": 0,
            "arguments": 0,
            "node": index if op.backward else None,
            "reads": list(op.reads),
            "writes": [],
            "outputs": list(op.returns),
            "flops": self._costs[index].flops,
            "moved_bytes": self._costs[index].moved_bytes,
            "workspace_bytes": 0,
            "random": False,
            "view": op.view,
            "replayable": op.replayable,
            "shape_only": _shape_only(op),
        }

    def _value(self, index: int) -> dict[str, Any]:
        tensor = self._joint.tensors[index]
        value = tensor.node.meta.get("val")
        shape: list[int] = []
        dtype = "float32"
        if isinstance(value, torch.Tensor):
            shape = [size_hint(s, 1) for s in value.shape]
            dtype = str(value.dtype).removeprefix("torch.")
        return {
            "allocation": tensor.storage,
            "version": 0,
            "offset": 0,
            "shape": shape,
            "stride": [],
            "dtype": self._id(dtype),
        }

    def _allocations(self) -> list[dict[str, Any]]:
        joint = self._joint
        read_in_backward: dict[int, int] = {}
        for index in range(self._forward_end, self._end):
            for tensor in joint.ops[index].reads:
                read_in_backward[joint.tensors[tensor].storage] = index
        returned = {joint.tensors[t].storage for t in joint.backward_outputs}
        rows = []
        for index, storage in enumerate(joint.storages):
            start, end = max(storage.op, 0), storage.last_forward + 1
            backward = storage.op >= self._forward_end
            if storage.op < 0 or index in returned:
                end = self._end
            elif storage.leaves:
                end = self._forward_end if index in joint.released else self._end
            elif backward:
                end = read_in_backward.get(index, storage.op) + 1
            rows.append(
                {
                    "bytes": storage.bytes,
                    "device": 0,
                    "category": "input" if storage.op < 0 else "activation",
                    "producer": storage.op if storage.op >= 0 else None,
                    "natural": [[start, max(end, start + 1)]],
                    "name": 0,
                    "law": None,
                }
            )
        return rows

    def _saved(self) -> list[dict[str, Any]]:
        joint, rows = self._joint, []
        for index in range(self._forward_end, self._end):
            for tensor in dict.fromkeys(joint.ops[index].reads):
                made = joint.tensors[tensor].op
                if 0 <= made < self._forward_end:
                    rows.append(
                        {
                            "value": tensor,
                            "node": index,
                            "pack": made + 1,
                            "unpack": index,
                            "release": index + 1,
                        }
                    )
        return rows


def _name(op: Op) -> str:
    target = op.node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _shape_only(op: Op) -> bool:
    target = op.node.target
    return isinstance(target, torch._ops.OpOverload) and operator_of(target).shape_only
