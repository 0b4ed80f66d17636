"""Which device has room for a step.

Responsible for :func:`device`. Not responsible for what a step takes (:mod:`memfit.api.fit`) nor
for how much is free (the program, which asks the system, NVML and the broker).
"""

from __future__ import annotations

from typing import Literal

import torch

from memfit import _native
from memfit.api.predict import predict, trace
from memfit.errors import DoesNotFit
from memfit.workload import Workload


def device(workload: Workload) -> torch.device:
    """Say on which device a step fits now.

    What counts is what is free there, and what the broker could still lease where one runs. Of the
    GPUs that this process sees the one with the most room is taken, and the CPU where no GPU has
    enough. Nothing is reserved: :func:`memfit.lease` does that.

    Args:
        workload: The step; its model may be on any device, or have no weights.

    Returns:
        The device.

    Raises:
        DoesNotFit: None has enough room; the message has the numbers of each.
        LeaseError: A broker is there and does not answer.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    seen = torch.cuda.device_count()
    rooms = {room["device"]: int(room["room_bytes"]) for room in _native.rooms()}
    gpus = {name: room for name, room in rooms.items() if _index(name) in range(seen)}
    numbers: list[str] = []
    needed = 0
    for kind, places in (("cuda", gpus), ("cpu", {"host": rooms.get("host", 0)})):
        if not places:
            continue
        needed = _needed(workload, "cuda" if kind == "cuda" else "cpu")
        best = max(places, key=lambda name: places[name])
        if needed <= places[best]:
            return torch.device(kind, _index(best)) if kind == "cuda" else torch.device("cpu")
        size = _native.bytes_text
        numbers += [f"`{name}` has {size(room)} of {size(needed)}" for name, room in places.items()]
    message = f"no device has room for the step: {', '.join(numbers)}"
    raise DoesNotFit(message, minimum_peak_bytes=needed)


def _index(name: str) -> int:
    """The number of a GPU; -1 for the host."""
    return int(name.partition(":")[2] or -1)


def _needed(workload: Workload, kind: Literal["cpu", "cuda"]) -> int:
    """What a step takes on a kind of device: on CUDA whole segments, and the context."""
    prediction = predict(trace(workload, device=kind))
    reserved = prediction.reserved
    if kind == "cpu" or reserved is None:
        return int(prediction.predicted_peak_bytes)
    # A process that has used the device has its context already, and what is free is without it.
    context = 0 if torch.cuda.is_initialized() else _native.context_bytes()  # type: ignore[no-untyped-call]
    return int(reserved.peak_reserved_bytes) + context
