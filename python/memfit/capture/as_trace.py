"""A recorded step as a trace.

Responsible for what only a recording knows: which of its rows is what, the numbers of autograd's
nodes, and how long a saved tensor is held that nobody let go. Not responsible for recording
(:mod:`memfit.capture.record`) nor for the document (:mod:`memfit.capture.trace_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.capture.record.recorder import Recorder
from memfit.capture.record.roles import Roles, Update
from memfit.capture.trace_writer import Meta, TraceWriter

_NUMBER_BYTES = 8


def trace_json(
    recorder: Recorder, roles: Roles, meta: Meta, workspace: Mapping[int, int]
) -> dict[str, Any]:
    """Say a recording as a trace.

    Args:
        recorder: The recorder, after the step has ended and its ledger was closed.
        roles: What its allocations are for.
        meta: Where the trace comes from.
        workspace: Scratch bytes by op index, where an op takes any.

    Returns:
        The trace.
    """
    writer = TraceWriter()
    nodes: dict[int, int] = {}
    _ops(writer, recorder, nodes, workspace)
    _saved(writer, recorder, nodes)
    _allocations(writer, recorder, roles, meta["device_kind"])
    for allocation, version, offset, shape, stride, dtype in recorder.ledger.values:
        writer.value(
            allocation, version=version, offset=offset, shape=shape, stride=stride, dtype=dtype
        )
    for region in recorder.modules.regions:
        writer.region(
            region.module, region.class_name, call=region.call, start=region.start, end=region.end
        )
    for update in roles.updates:
        _update(writer, update)
    return writer.trace(meta)


def _ops(
    writer: TraceWriter, recorder: Recorder, nodes: dict[int, int], workspace: Mapping[int, int]
) -> None:
    for index, op in enumerate(recorder.ops):
        node = None if op.sequence is None else nodes.setdefault(op.sequence, len(nodes))
        writer.op(
            op.operator.name,
            op.phase,
            module=op.module,
            source=op.source,
            arguments=op.arguments,
            node=node,
            reads=op.reads,
            writes=op.writes,
            outputs=op.outputs,
            flops=op.flops,
            moved_bytes=op.moved_bytes,
            workspace_bytes=workspace.get(index, 0),
            random=op.random,
            view=op.view,
            replayable=op.replayable,
            shape_only=op.operator.shape_only,
        )


def _saved(writer: TraceWriter, recorder: Recorder, nodes: dict[int, int]) -> None:
    """Add what autograd saved; what it never let go, it holds to the end of the step."""
    end = len(recorder.ops)
    for save in recorder.saved.saves:
        writer.saved(
            save.value,
            node=nodes.setdefault(save.sequence, len(nodes)),
            pack=save.pack,
            unpack=save.unpack,
            release=max(save.release if save.release is not None else end, save.pack),
        )


def _allocations(writer: TraceWriter, recorder: Recorder, roles: Roles, kind: str) -> None:
    """Add the storages; of a step on a GPU, what lies on the CPU takes none of its memory.

    Single numbers do, as ever: an optimizer counts the steps of each parameter there.
    """
    ledger = recorder.ledger
    packed = {save.allocation for save in recorder.saved.saves}
    for allocation, size_bytes in enumerate(ledger.bytes):
        is_number = size_bytes <= _NUMBER_BYTES
        here = kind == "cpu" or is_number or ledger.device[allocation] != "cpu"
        writer.allocation(
            size_bytes if here else 0,
            device=writer.device(ledger.device[allocation]),
            category=roles.category(
                allocation, existed=ledger.static[allocation], packed=allocation in packed
            ),
            producer=ledger.producer[allocation],
            natural=ledger.ranges(allocation),
            name=roles.names.get(allocation, ""),
        )


def _update(writer: TraceWriter, update: Update) -> None:
    writer.update(
        update.parameter,
        update.gradient,
        ready=update.ready,
        temporary_bytes=update.temporary_bytes,
        moved_bytes=update.moved_bytes,
        state=update.state,
    )
