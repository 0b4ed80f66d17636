"""From a workload to the JSON of a trace.

Responsible for choosing how to capture (on fakes, or with one real step where that is impossible),
for the second batch size, and for what the engine is handed. Not responsible for any of the parts.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from memfit.capture.emit import StepFacts, trace_json
from memfit.capture.fake import (
    fake_stage,
    initialise_optimizer,
    ordinary_tensors,
    preserved_random_state,
    set_batch,
)
from memfit.capture.optimizer_updates import fused_optimizer_refusal, probe_updates
from memfit.capture.recorder import RealStepNeeded, Recorder
from memfit.capture.stage import Stage
from memfit.capture.step import StepRunner
from memfit.workload import Workload, batch_size


def second_batch_size(batch: int) -> int:
    """Another batch size to record at, so that sizes can be told apart from the batch.

    Args:
        batch: The batch size given.

    Returns:
        Half of it when that is whole, twice it for 1, else one less.
    """
    if batch == 1:
        return 2
    return batch // 2 if batch % 2 == 0 else batch - 1


def record(
    workload: Workload,
    *,
    target: str = "",
    device: str | None = None,
    batch_size: int | None = None,
    probe: bool = True,
    lean: bool = True,
) -> dict[str, Any]:
    """Record one step of a workload at one batch size.

    Args:
        workload: What to record; its model, gradients and the random state stay as they are.
        target: What was captured, as the user named it.
        device: ``cpu`` or ``cuda``; ``None`` for where the model is.
        batch_size: Number of examples; ``None`` for the batch as given.
        probe: Whether to run ops that take scratch memory once each, to measure it.
        lean: Whether to record lives as if autograd saved nothing; otherwise autograd keeps what
            it saves, and natural ranges are unplanned lives.

    Returns:
        The JSON of a trace.

    Raises:
        WorkloadError: The user's own code failed.
        CaptureError: The step cannot be recorded.
    """
    with preserved_random_state():
        stage = fake_stage(workload)
        return _record_fake(stage, target, batch_size, probe=probe, updates=True, lean=lean)


def capture(
    workload: Workload, *, target: str = "", device: str | None = None, probe: bool = True
) -> bytes:
    """Capture a workload at two batch sizes, as an encoded trace.

    Args:
        workload: What to capture; its model, gradients and the random state stay as they are.
        target: What was captured, as the user named it.
        device: ``cpu`` or ``cuda``; ``None`` for where the model is.
        probe: Whether to run ops that take scratch memory once each, to measure it.

    Returns:
        The trace, as the engine encodes it.

    Raises:
        WorkloadError: The user's own code failed.
        CaptureError: The step cannot be recorded.
    """
    from memfit._native import Trace

    first, second = record_pair(workload, target=target, device=device, probe=probe)
    other = json.dumps(second).encode() if second is not None else None
    return bytes(Trace.from_json(json.dumps(first).encode(), other).encode())


def record_pair(
    workload: Workload, *, target: str = "", device: str | None = None, probe: bool = True
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Record a step at the batch size given and at another.

    Args:
        workload: What to record.
        target: What was captured, as the user named it.
        device: ``cpu`` or ``cuda``; ``None`` for where the model is.
        probe: Whether to run ops that take scratch memory once each, to measure it.

    Returns:
        Both traces as JSON; the second is ``None`` when the batch has no batch dimension.
    """
    with preserved_random_state():
        stage = fake_stage(workload)
        first = _record_fake(stage, target, None, probe=probe, updates=True, lean=True)
        size = first["meta"]["batch"]
        if size == 0:
            return first, None
        other = second_batch_size(size)
        second = _record_fake(stage, target, other, probe=probe, updates=False, lean=True)
    return first, second


def _record_fake(
    stage: Stage, target: str, size: int | None, *, probe: bool, updates: bool, lean: bool
) -> dict[str, Any]:
    """Record the step of a fake stage."""
    workload = stage.workload
    if size is not None:
        set_batch(stage, size)
    own = frozenset(id(p) for p in workload.model.parameters())
    recorder = Recorder(stage.model, stage.fake_mode, lean=lean, own_parameters=own)
    assert stage.fake_mode is not None
    with stage.fake_mode, ordinary_tensors():
        initialise_optimizer(stage)
        runner = StepRunner(stage, recorder)
        roles = runner.run()
        if updates:
            pairs = list(zip((p for p, _, _ in runner.ready.values()), roles.updates, strict=True))
            probe_updates(stage, pairs)
    facts = StepFacts(
        target=target,
        torch_version=torch.__version__,
        device_kind="cpu",
        optimizer=type(stage.optimizer).__name__ if stage.optimizer is not None else "",
        batch=batch_size(stage.batch, workload.batch_dim),
        training=workload.training,
        captured="fake",
        parameters=roles.parameters,
        module_buffers=roles.module_buffers,
        inputs=roles.inputs,
        optimizer_state=roles.optimizer_state,
        gradients=roles.gradients,
        names=roles.names,
        updates=roles.updates,
        loss=roles.loss,
        fused_optimizer_refusal=fused_optimizer_refusal(stage),
    )
    return trace_json(recorder, facts)
