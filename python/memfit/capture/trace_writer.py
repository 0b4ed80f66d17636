"""The recorded step as the JSON of a trace.

Responsible for the shape of that JSON (the field names are those of the engine's ``Trace``), for
categories, which bind only when the step has ended, and for interning strings. Not responsible for
recording.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from memfit.capture.record.recorder import FORWARD, OpRecord, Recorder

_COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})
_SCALINGS = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"})
_SUMS = frozenset({"aten.add.Tensor"})
_DEEPEST_LOSS = 32


@dataclass(slots=True)
class Update:
    """What is known about one trainable parameter.

    Attributes:
        parameter: Allocation of the parameter.
        gradient: Allocation of its gradient.
        ready: Position at which the gradient is complete.
        temporary_bytes: Peak of temporaries while the optimizer updates it alone.
        moved_bytes: Bytes moved by that update.
        state: Allocations of the optimizer's state for this parameter alone.
    """

    parameter: int
    gradient: int
    ready: int
    temporary_bytes: int = 0
    moved_bytes: int = 0
    state: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepFacts:
    """What the runner of the step knows and the recorder does not.

    Attributes:
        target: What was captured, as the user named it.
        torch_version: ``torch.__version__``.
        device_kind: ``cpu`` or ``cuda``.
        optimizer: Class name of the optimizer, empty without one.
        batch: Batch size.
        training: Whether backward ran.
        captured: ``fake`` or ``real``.
        parameters: Allocations of parameters.
        module_buffers: Allocations of module buffers.
        inputs: Allocations of batch tensors.
        optimizer_state: Allocations of optimizer state.
        gradients: Allocations of gradients.
        names: Name of an allocation that has one.
        fixed: Allocations of parameters in memory that cannot be let go.
        updates: Trainable parameters in the order their gradients became ready.
        loss: Value of the loss, or ``None``.
        fused_optimizer_refusal: Why the optimizer cannot run inside backward.
        per_parameter_refusal: Why it cannot run parameter by parameter after backward.
        offloaded_parameters_refusal: Why parameters cannot be offloaded with this torch.
        probe_threads: Threads that the workspace probes ran with.
        notes: Things the reader should know.
        workspace: Scratch bytes by op index.
    """

    target: str
    torch_version: str
    device_kind: str
    optimizer: str
    batch: int
    training: bool
    captured: str
    parameters: set[int] = field(default_factory=set)
    module_buffers: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    optimizer_state: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    updates: list[Update] = field(default_factory=list)
    loss: int | None = None
    fused_optimizer_refusal: str | None = None
    per_parameter_refusal: str | None = None
    offloaded_parameters_refusal: str | None = None
    probe_threads: int = 0
    notes: list[str] = field(default_factory=list)
    workspace: dict[int, int] = field(default_factory=dict)


class _Strings:
    """Interned strings; index 0 is the empty one."""

    def __init__(self) -> None:
        self.table: list[str] = [""]
        self._ids: dict[str, int] = {"": 0}

    def id(self, text: str) -> int:
        found = self._ids.get(text)
        if found is None:
            found = self._ids[text] = len(self.table)
            self.table.append(text)
        return found


def trace_json(recorder: Recorder, facts: StepFacts) -> dict[str, Any]:
    """Build the JSON of a trace.

    Args:
        recorder: The recorder, after the step has ended and its ledger was closed.
        facts: What the runner knows.

    Returns:
        The trace, with the engine's field names.
    """
    strings = _Strings()
    devices: list[str] = []
    nodes: dict[int, int] = {}
    end = len(recorder.ops)
    ops = [
        _op(op, strings, nodes, facts.workspace.get(index, 0))
        for index, op in enumerate(recorder.ops)
    ]
    saved = [
        {
            "value": save.value,
            "node": nodes.setdefault(save.sequence, len(nodes)),
            "pack": save.pack,
            "unpack": save.unpack,
            "release": max(save.release if save.release is not None else end, save.pack),
        }
        for save in recorder.saved.saves
    ]
    return {
        "meta": _meta(recorder, facts),
        "allocations": _allocations(recorder, facts, strings, devices),
        "devices": devices,
        "values": [
            {
                "allocation": allocation,
                "version": version,
                "offset": offset,
                "shape": list(shape),
                "stride": list(stride),
                "dtype": strings.id(str(dtype).removeprefix("torch.")),
            }
            for allocation, version, offset, shape, stride, dtype in recorder.ledger.values
        ],
        "ops": ops,
        "saved": saved,
        "regions": [
            {
                "module": strings.id(region.module),
                "class": strings.id(region.class_name),
                "call": region.call,
                "start": region.start,
                "end": region.end,
            }
            for region in recorder.modules.regions
        ],
        "updates": [
            {
                "parameter": update.parameter,
                "gradient": update.gradient,
                "ready": update.ready,
                "temporary_bytes": update.temporary_bytes,
                "moved_bytes": update.moved_bytes,
                "state": update.state,
            }
            for update in facts.updates
        ],
        "strings": strings.table,
        "couplings": None,
    }


def _meta(recorder: Recorder, facts: StepFacts) -> dict[str, Any]:
    return {
        "target": facts.target,
        "torch_version": facts.torch_version,
        "device_kind": facts.device_kind,
        "optimizer": facts.optimizer,
        "batch": facts.batch,
        "training": facts.training,
        "captured": facts.captured,
        "probe_threads": facts.probe_threads,
        "fused_optimizer_refusal": facts.fused_optimizer_refusal,
        "per_parameter_refusal": facts.per_parameter_refusal,
        "offloaded_parameters_refusal": facts.offloaded_parameters_refusal,
        "loss_reduction": loss_reduction(recorder, facts).kind,
        "fixed_parameters": sorted(facts.fixed),
        "notes": [*recorder.notes, *facts.notes],
    }


def _op(
    op: OpRecord, strings: _Strings, nodes: dict[int, int], workspace_bytes: int
) -> dict[str, Any]:
    node = None
    if op.sequence is not None:
        node = nodes.setdefault(op.sequence, len(nodes))
    return {
        "name": strings.id(op.operator.name),
        "phase": op.phase,
        "module": strings.id(op.module),
        "source": strings.id(op.source),
        "arguments": strings.id(op.arguments),
        "node": node,
        "reads": op.reads,
        "writes": op.writes,
        "outputs": op.outputs,
        "flops": op.flops,
        "moved_bytes": op.moved_bytes,
        "workspace_bytes": workspace_bytes,
        "random": op.random,
        "view": op.view,
        "replayable": op.replayable,
        "shape_only": op.operator.shape_only,
    }


def _allocations(
    recorder: Recorder, facts: StepFacts, strings: _Strings, devices: list[str]
) -> list[dict[str, Any]]:
    ledger = recorder.ledger
    packed = {save.allocation for save in recorder.saved.saves}
    rows = []
    for allocation, size in enumerate(ledger.bytes):
        device = ledger.device[allocation]
        if device not in devices:
            devices.append(device)
        rows.append(
            {
                "bytes": size,
                "device": devices.index(device),
                "category": _category(allocation, facts, packed, static=ledger.static[allocation]),
                "producer": ledger.producer[allocation],
                "natural": ledger.ranges(allocation),
                "name": strings.id(facts.names.get(allocation, "")),
                "law": None,
            }
        )
    return rows


def _category(allocation: int, facts: StepFacts, packed: set[int], *, static: bool) -> str:
    roles = (
        (facts.parameters, "parameter"),
        (facts.module_buffers, "module_buffer"),
        (facts.optimizer_state, "optimizer_state"),
        (facts.inputs, "input"),
        (facts.gradients, "gradient"),
    )
    for members, role in roles:
        if allocation in members:
            return role
    if static:
        return "input"
    return "activation" if allocation in packed else "temporary"


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


def loss_reduction(recorder: Recorder, facts: StepFacts) -> Reduction:
    """How the loss reduces over the batch, followed back from its value.

    Args:
        recorder: The recorder after the step.
        facts: Names the loss value and the batch size.

    Returns:
        The reduction.
    """
    if facts.loss is None or facts.batch <= 0:
        return Reduction()
    producers: dict[int, int] = {}
    for index, op in enumerate(recorder.ops):
        if op.phase != FORWARD:
            break
        for value in (*op.outputs, *op.writes):
            producers[value] = index
    return _follow(facts.loss, recorder, facts.batch, producers, depth=0)


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
