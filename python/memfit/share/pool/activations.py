"""What one call of a model takes besides its weights.

Responsible for turning a prediction of an inference step into bytes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from memfit import _native
from memfit.answers import Prediction, Trace
from memfit.capture import capture
from memfit.share.pool.device import HOST
from memfit.workload import Workload

_THE_MODEL = ("parameter", "module_buffer")


def activation_bytes(model: nn.Module, example: Any, device: str = HOST) -> int:
    """Predict what a call of the model takes besides its parameters and module buffers.

    On a GPU that is what torch's caching allocator takes from the device: whole segments, which
    nobody else can have. The model's own bytes are in none of them, as they lie in memory of their
    own.

    Args:
        model: The model, awake.
        example: Inputs as large as they come: a tensor, or a tuple or dict of arguments.
        device: Where the model runs.

    Returns:
        Bytes at the peak of a forward without gradients, inputs included; the upper end where the
        prediction is an interval.

    Raises:
        WorkloadError: The model fails with these inputs.
        CaptureError: The call cannot be recorded.
    """
    kind = None if device == HOST else "cuda"
    recorded = Trace.decode(capture(Workload(model, example), target="", device=kind))
    asked = {"batch": None, "budget": None}
    prediction = Prediction.of(_native.predict(recorded.native, asked))
    highest = prediction.interval_bytes[1]
    reserved = _native.reserved_beside_model(recorded.native)
    if reserved is not None:
        return reserved + highest - prediction.predicted_peak_bytes
    at_peak = prediction.breakdown.category
    return highest - sum(part.bytes for part in at_peak if part.name in _THE_MODEL)
