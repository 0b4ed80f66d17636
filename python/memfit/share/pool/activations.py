"""What one call of a model takes besides its weights.

Responsible for recording a call without running it, and for turning a prediction of an inference
step into bytes. Not responsible for calls of other sizes (:mod:`memfit.share.pool.law`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from memfit import _native
from memfit.answers import Prediction
from memfit.capture import capture
from memfit.capture.record.recorder import RealStepNeeded
from memfit.capture.recording import record_stage
from memfit.capture.stage.fake import fake_stage, preserved_random_state
from memfit.share.pool.device import HOST
from memfit.tensors.garbage import no_collection
from memfit.workload import Workload

_THE_MODEL = ("parameter", "module_buffer")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


def inputs_of(example: Any) -> Inputs:
    """The arguments that an example stands for.

    Args:
        example: A tensor, or a tuple or dict of arguments.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def workload_of_call(model: nn.Module, inputs: Inputs) -> Workload:
    """A call of a model as a step.

    Args:
        model: The model, awake.
        inputs: What it is called with.
    """
    return Workload(model, inputs, forward=lambda it, batch: it(*batch[0], **batch[1]))


def recorded_call(
    model: nn.Module, inputs: Inputs, device: str, *, probe: bool = True
) -> _native.Trace | None:
    """Record a call without running it.

    Args:
        model: The model, awake.
        inputs: What it is called with.
        device: Where the model runs, as the broker names it.
        probe: Whether to run ops that take scratch memory once each, to measure it.

    Returns:
        The trace; ``None`` where the call can only be recorded by running it.

    Raises:
        WorkloadError: The model fails with these inputs.
        CaptureError: The call cannot be recorded.
    """
    with preserved_random_state(), no_collection():
        try:
            stage = fake_stage(workload_of_call(model, inputs), _kind(device))
            recorded = record_stage(stage, None, probe=probe, updates=False)
        except RealStepNeeded:
            return None
    return _native.Trace.from_json(json.dumps(recorded).encode(), None, 0)


def run_call(model: nn.Module, inputs: Inputs, device: str) -> _native.Trace:
    """Record a call that has to run for it, as small as the model takes it, and scale that.

    Args:
        model: The model, awake.
        inputs: What it is called with.
        device: Where the model runs, as the broker names it.

    Raises:
        WorkloadError: The model fails with these inputs.
        CaptureError: The call cannot be recorded.
    """
    encoded = capture(workload_of_call(model, inputs), device=_kind(device))
    return _native.Trace.decode(encoded)


def beside_model(trace: _native.Trace) -> tuple[int, int]:
    """What a recorded call takes besides the model's parameters and module buffers.

    On a GPU that is what torch's caching allocator takes from the device: whole segments, which
    nobody else can have. The model's own bytes are in none of them, as they lie in memory of their
    own.

    Args:
        trace: The recording.

    Returns:
        Bytes at the peak of a forward without gradients, inputs included: as predicted, and the
        upper end of the interval.
    """
    prediction = Prediction.of(_native.predict(trace, {"batch": None, "budget": None}))
    predicted = prediction.predicted_peak_bytes
    above = prediction.interval_bytes[1] - predicted
    reserved = _native.reserved_beside_model(trace)
    if reserved is not None:
        return reserved, reserved + above
    at_peak = prediction.breakdown.category
    beside = predicted - sum(part.bytes for part in at_peak if part.name in _THE_MODEL)
    return beside, beside + above


def _kind(device: str) -> str | None:
    return None if device == HOST else "cuda"
