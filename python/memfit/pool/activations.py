"""What one call of a model takes besides its weights.

Responsible for turning a prediction of an inference step into bytes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from memfit.questions import predict
from memfit.workload import Workload

_THE_MODEL = ("parameter", "buffer")


def activation_bytes(model: nn.Module, example: Any) -> int:
    """Predict what a call of the model takes besides its parameters and module buffers.

    Args:
        model: The model, awake.
        example: Inputs as large as they come: a tensor, or a tuple or dict of arguments.

    Returns:
        Bytes at the peak of a forward without gradients, inputs included; the upper end where the
        prediction is an interval.

    Raises:
        WorkloadError: The model fails with these inputs.
        CaptureError: The call cannot be recorded.
    """
    prediction = predict(Workload(model, example))
    at_peak = prediction.breakdown.category
    static = sum(part.bytes for part in at_peak if part.name in _THE_MODEL)
    return int(prediction.interval_bytes[1]) - int(static)
