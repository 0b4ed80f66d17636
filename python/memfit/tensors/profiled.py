"""What a call allocates on the CPU, by the allocator's events in torch's profiler.

Responsible for the most that a call has at once beyond what was there, and for what it leaves. Not
responsible for what was there before (:mod:`memfit.measure.peak`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.torch_versions import profiled_memory

_MEASURED = "memfit: measured call"


def profiled_bytes(call: Callable[[], Any]) -> tuple[int, int]:
    """Run a call and say what it allocated.

    Args:
        call: What to run; its result is dropped.

    Returns:
        Most bytes beyond those before the call, and bytes that it allocated and did not free (freed
        if negative).
    """
    with profiled_memory() as profiled, torch.profiler.record_function(_MEASURED):
        call()
    happened = profiled.profiler.kineto_results.events()
    start = next(event.start_ns() for event in happened if event.name() == _MEASURED)
    events = [
        (event.start_ns(), event.nbytes())
        for event in happened
        if event.name() == "[memory]"
        and event.device_type() == torch._C._autograd.DeviceType.CPU
        and event.start_ns() >= start
    ]
    events.sort(key=lambda event: event[0])  # stable: simultaneous events keep their order
    current = highest = 0
    for _, size in events:
        current += size
        highest = max(highest, current)
    return highest, current
