"""From a workload to the JSON of a trace.

Responsible for choosing how to capture (on fakes, or with one real step where that is impossible),
for the second batch size, and for what the engine is handed. Not responsible for any of the parts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.as_trace import trace_json
from memfit.capture.ctx_cycles import CtxCycleSearch
from memfit.capture.probe.gpu_scratch import probe_gpu_scratch
from memfit.capture.probe.optimizer_updates import (
    fused_optimizer_refusal,
    per_parameter_refusal,
    probe_updates,
)
from memfit.capture.probe.workspace import Scratch, probe_scratch
from memfit.capture.record.gradient_mode import Gradients
from memfit.capture.record.item_positions import size_or_place_used
from memfit.capture.record.model_checkpoints import ModelCheckpoints
from memfit.capture.record.originals import Originals
from memfit.capture.record.recorder import RealStepNeeded, Recorder
from memfit.capture.record.returned import Returned
from memfit.capture.record.step import StepRunner
from memfit.capture.record.step_loss import Reduction, loss_reduction
from memfit.capture.retained_graph import graph_note
from memfit.capture.stage import cublas
from memfit.capture.stage.cuda import CudaRunner
from memfit.capture.stage.fake import (
    fake_stage,
    initialise_optimizer,
    ordinary_tensors,
    preserved_random_state,
    set_batch,
)
from memfit.capture.stage.real import real_stage
from memfit.capture.stage.stage import Stage, device_of
from memfit.capture.trace_writer import Meta, with_held
from memfit.errors import CaptureError, WorkloadError
from memfit.tensors.garbage import no_collection
from memfit.tensors.gradient_hooks import forward_hooks, gradient_hooks
from memfit.tensors.moments import eight_bit_refusal
from memfit.torch_versions import offloaded_parameters_refusal
from memfit.weights.absent_gpu import is_pretended, pretended_gpu
from memfit.weights.weightless import require_weights
from memfit.workload import Workload, batch_size


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What a recording tells that two of them are compared by.

    Attributes:
        reduction: How the loss reduces over the batch.
        returned: What a forward of inference returned; ``None`` in training.
    """

    reduction: Reduction
    returned: Returned | None


def second_batch_size(batch: int) -> int:
    """Another batch size to record at, so that sizes can be told apart from the batch.

    Args:
        batch: The batch size given.

    Returns:
        Half of it, rounded down; two for a batch of three, and twice it below, as a batch of one
        takes paths of its own (nothing to broadcast, nothing to sum).
    """
    return batch // 2 if batch > 3 else 2 if batch == 3 else 2 * batch  # noqa: PLR2004 - see above


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
    with preserved_random_state(), no_collection():
        try:
            stage = fake_stage(workload, device)
            return _record(stage, target, batch_size, probe=probe, updates=True, lean=lean)[0]
        except RealStepNeeded as reason:
            _refuse_real(workload, device, str(reason))
            if batch_size is None:
                return _record_smallest(workload, target, str(reason), probe=probe)[0]
            return _record_real(workload, target, batch_size, str(reason), probe=probe)[0]


def capture(
    workload: Workload,
    *,
    target: str = "",
    device: str | None = None,
    probe: bool = True,
    notes: Iterable[str] = (),
    compare_graph: bool = False,
) -> bytes:
    """Capture a workload at two batch sizes, as an encoded trace.

    Args:
        workload: What to capture; its model, gradients and the random state stay as they are.
        target: What was captured, as the user named it.
        device: ``cpu`` or ``cuda``; ``None`` for where the model is.
        probe: Whether to run ops that take scratch memory once each, to measure it.
        notes: What else the reader of the trace should know.
        compare_graph: Whether to note what autograd's graph takes, or would take, in a forward of
            inference, which is recorded once more for that.

    Returns:
        The trace, as the engine encodes it.

    Raises:
        WorkloadError: The user's own code failed.
        CaptureError: The step cannot be recorded.
    """
    from memfit._native import Trace

    first, second = record_pair(workload, target=target, device=device, probe=probe)
    if compare_graph and not workload.training and first["meta"]["captured"] == "fake":
        first["meta"]["notes"].extend(_graph_notes(workload, first, device, probe=probe))
    first["meta"]["notes"].extend(notes)
    other = json.dumps(second).encode() if second is not None else None
    wanted = batch_size(workload.batch, workload.batch_dim)
    return bytes(Trace.from_json(json.dumps(first).encode(), other, wanted).encode())


def _graph_notes(
    workload: Workload, trace: dict[str, Any], device: str | None, *, probe: bool
) -> list[str]:
    """What autograd's graph takes, or would take, in a forward of inference that was recorded."""

    def again(gradients: Gradients) -> dict[str, Any] | None:
        with preserved_random_state(), no_collection():
            try:
                stage = fake_stage(workload, device)
                return _record(
                    stage, "", None, probe=probe, updates=False, lean=True, gradients=gradients
                )[0]
            except RealStepNeeded:
                return None

    note = graph_note(trace, again)
    return [] if note is None else [note]


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
        Both traces as JSON; the second is ``None`` when the batch has no batch dimension, or the
        step fails at another size.
    """
    with preserved_random_state(), no_collection():
        try:
            stage = fake_stage(workload, device)
            first, learnt = _record(stage, target, None, probe=probe, updates=True, lean=True)
        except RealStepNeeded as reason:
            _refuse_real(workload, device, str(reason))
            return _record_real_pair(workload, target, str(reason), probe=probe)
        size = first["meta"]["batch"]
        if size == 0:
            return first, None
        other = second_batch_size(size)
        try:
            second, again = _record(stage, target, other, probe=probe, updates=False, lean=True)
        except (WorkloadError, RealStepNeeded) as error:
            return _note_single_size(first, other, error), None
    return _agree(first, learnt, second, again), second


def record_stage(
    stage: Stage,
    size: int | None,
    *,
    probe: bool,
    updates: bool,
    undone: bool = False,
    expected: list[str] | None = None,
) -> dict[str, Any]:
    """Record the step of a stage as it is.

    Args:
        stage: What to run; may be recorded again afterwards.
        size: Number of examples; ``None`` for the workload's own.
        probe: As in :func:`record`.
        updates: Whether to measure the optimizer's update of each parameter.
        undone: Whether the model's own checkpoints run as ordinary forwards.
        expected: Names of the ops that it has to run; ``None`` for any.

    Returns:
        The JSON of a trace.

    Raises:
        WorkloadError: The user's own code failed.
        CaptureError: Without its checkpoints the step may compute something else.
        RealStepNeeded: The step cannot be followed on fakes, or runs another op.
    """
    given = batch_size(stage.workload.batch, stage.workload.batch_dim)
    set_batch(stage, given if size is None else size)
    recorded, _ = _record(
        stage,
        "",
        None,
        probe=probe,
        updates=updates,
        lean=True,
        undone=undone,
        expected=expected,
    )
    return recorded


def _note_single_size(trace: dict[str, Any], failed: int, error: BaseException) -> dict[str, Any]:
    """Say in a trace why nothing is known about other batch sizes."""
    trace["meta"]["notes"].append(
        f"nothing is known about other batch sizes, because the step fails at {failed}: {error}"
    )
    trace["meta"]["loss_reduction"] = ""
    return trace


def _agree(
    first: dict[str, Any], one: _Learnt, second: dict[str, Any], other: _Learnt
) -> dict[str, Any]:
    """The first trace, with what both tell of the loss, or of what a forward returns.

    The reduction of a loss is kept only if it grows with the batch.
    """
    sizes = first["meta"]["batch"], second["meta"]["batch"]
    if one.reduction.elements * sizes[1] != other.reduction.elements * sizes[0]:
        first["meta"]["loss_reduction"] = ""
    refusal = size_or_place_used(first, second)
    if one.returned is not None and other.returned is not None:
        refusal = one.returned.refusal_beside(other.returned) or refusal
    meta = first["meta"]
    meta["micro_batch_refusal"] = meta["micro_batch_refusal"] or refusal or None
    return first


def _refuse_real(workload: Workload, device: str | None, reason: str) -> None:
    """Refuse the real step without weights, or on another device than the one asked for."""
    require_weights(workload, reason)
    here = device_of(workload.model)
    if device is not None and device != here:
        message = f"{reason}; such a step runs where the model is: capture it for `{here}`"
        raise CaptureError(message)


def _record_real_pair(
    workload: Workload, target: str, reason: str, *, probe: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Record real steps at two small batch sizes that take the same ops, if there are such."""
    first, learnt = _record_smallest(workload, target, reason, probe=probe)
    size = first["meta"]["batch"]
    if size == 0:
        return first, None
    try:
        second, again = _record_real(workload, target, 2 * size, reason, probe=probe)
        if size == 1 and len(first["ops"]) != len(second["ops"]):
            first, learnt = _record_real(workload, target, 2, reason, probe=probe)
            second, again = _record_real(workload, target, 4, reason, probe=probe)
    except WorkloadError as error:
        return _note_single_size(first, 2 * size, error), None
    return _agree(first, learnt, second, again), second


def _record_smallest(
    workload: Workload, target: str, reason: str, *, probe: bool
) -> tuple[dict[str, Any], _Learnt]:
    """Record a real step at the smallest batch the model takes: 1, else 2, else all of it."""
    given = batch_size(workload.batch, workload.batch_dim)
    for size in (1, 2):
        if size < given:
            # Batch normalisation, for one, refuses a single example.
            with contextlib.suppress(WorkloadError):
                return _record_real(workload, target, size, reason, probe=probe)
    return _record_real(workload, target, given, reason, probe=probe)


def _record_real(
    workload: Workload, target: str, size: int, reason: str, *, probe: bool
) -> tuple[dict[str, Any], _Learnt]:
    """Record one real step of a copy of the model."""
    stage = real_stage(workload, size, reason)
    trace, learnt = _record(stage, target, None, probe=probe, updates=True, lean=True)
    batch = trace["meta"]["batch"]
    at = f" at batch {batch}" if batch else ""
    trace["meta"]["notes"].append(f"captured by one real step{at}, because {reason}")
    return trace, learnt


def _record(
    stage: Stage,
    target: str,
    size: int | None,
    *,
    probe: bool,
    updates: bool,
    lean: bool,
    gradients: Gradients | None = None,
    undone: bool = False,
    expected: list[str] | None = None,
) -> tuple[dict[str, Any], _Learnt]:
    """Record the step of a stage, at another batch size where one is given."""
    workload = stage.workload
    if size is not None:
        set_batch(stage, size)
    recorder = Recorder(
        stage.model,
        stage.fake_mode,
        lean=lean,
        originals=Originals(stage.workload),
        on_gpu=stage.device == "cuda",
        expected=expected,
    )
    with contextlib.ExitStack() as stack:
        if stage.fake_mode is not None:
            stack.enter_context(stage.fake_mode)
            stack.enter_context(ordinary_tensors())
            initialise_optimizer(stage)
        if stage.device == "cuda":
            stack.enter_context(pretended_gpu())
        is_faked = stage.device == "cuda" and stage.fake_mode is not None
        runner_type = CudaRunner if is_faked else StepRunner
        runner = runner_type(stage, recorder)
        runner.gradients = gradients
        checkpoints = ModelCheckpoints(recorder, undone=undone)
        search = CtxCycleSearch(stage)
        with checkpoints.met():
            roles = runner.run()
        cycles = search.found()
        kept_for = checkpoints.refusal(roles.parameters)
        if undone and kept_for:
            raise CaptureError(kept_for)
        if updates:
            pairs = list(zip((p for p, _, _ in runner.ready.values()), roles.updates, strict=True))
            probe_updates(stage, pairs)
    scratch = Scratch()
    if probe and (stage.device == "cpu" or not is_pretended()):
        probed = probe_scratch if stage.device == "cpu" else probe_gpu_scratch
        with torch.set_grad_enabled(any(op.sequence is not None for op in recorder.ops)):
            scratch = probed(recorder.scratch_calls, _result_bytes(recorder))
        _correct_results(recorder, scratch.results)
    batch = batch_size(stage.batch, workload.batch_dim)
    reduction = loss_reduction(recorder, roles.loss, batch)
    meta = Meta(
        target=target,
        torch_version=torch.__version__,
        device_kind=stage.device,
        optimizer=type(stage.optimizer).__name__ if stage.optimizer is not None else "",
        batch=batch,
        training=workload.training,
        captured="real" if stage.fake_mode is None else "fake",
        probe_threads=scratch.threads,
        fused_optimizer_refusal=fused_optimizer_refusal(stage),
        per_parameter_refusal=per_parameter_refusal(stage),
        eight_bit_refusal=eight_bit_refusal(stage.optimizer) if stage.optimizer else None,
        half_parameters=stage.has_narrow_parameters,
        micro_batch_refusal=_cut_refusal(workload, runner.returned) or cycles.cut_refusal,
        offloaded_parameters_refusal=offloaded_parameters_refusal(),
        loss_reduction=reduction.kind,
        fixed_parameters=sorted(roles.fixed),
        inference=_inference(workload, runner.returned),
        checkpoints=(
            {"count": checkpoints.count, "refusal": kept_for} if checkpoints.count else None
        ),
        notes=[*recorder.notes, *scratch.notes, *filter(None, [cycles.note])],
    )
    trace = trace_json(recorder, roles, meta, scratch.bytes)
    return _with_libraries(trace, recorder, stage), _Learnt(reduction, runner.returned)


def _cut_refusal(workload: Workload, returned: Returned | None) -> str | None:
    """Why the batch cannot be cut for reasons that ops do not show."""
    if returned is None:
        return gradient_hooks(workload.model)
    return returned.refusal or forward_hooks(workload.model, own=True)


def _inference(workload: Workload, returned: Returned | None) -> dict[str, Any] | None:
    """What a forward of inference returns, as a trace says it."""
    if returned is None:
        return None
    is_model_call = workload.forward is None and workload.batch_dim == 0
    return {
        "returns": list(returned.values),
        "is_model_call": is_model_call,
        "has_graph": returned.has_graph,
    }


def _with_libraries(trace: dict[str, Any], recorder: Recorder, stage: Stage) -> dict[str, Any]:
    """A trace with what libraries keep of the GPU from the step's first matrix product on."""
    if stage.device != "cuda":
        return trace
    names = (op.operator.name for op in recorder.ops)
    size_bytes = cublas.workspace_bytes(names, training=stage.workload.training)
    if not size_bytes:
        return trace
    return with_held(trace, cublas.NAME, [(size_bytes, len(recorder.ops))], "workspace")


def _result_bytes(recorder: Recorder) -> dict[int, int]:
    """Bytes of what each op that may need scratch returns, by op index."""
    sizes = recorder.ledger.value_bytes
    return {
        index: sum(sizes[value] for value in recorder.ops[index].outputs)
        for index in recorder.scratch_calls
    }


def _correct_results(recorder: Recorder, results: dict[int, tuple[int, ...]]) -> None:
    """Take over the true sizes of storages that fakes know too little about.

    An opaque workspace is one, which fakes give no element, and a loss that lies in the memory of
    what it sums.
    """
    ledger = recorder.ledger
    for index, sizes in results.items():
        outputs = recorder.ops[index].outputs
        if len(outputs) != len(sizes):
            continue
        for value, size in zip(outputs, sizes, strict=True):
            allocation = ledger.values[value][0]
            if ledger.producer[allocation] == index:
                ledger.bytes[allocation] = size
                ledger.give_elements(value)
