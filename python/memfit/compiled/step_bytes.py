"""What of a step is no matter of its graphs: what is static, and the optimizer.

Responsible for reading both off the eager trace. Not responsible for graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STATIC = frozenset({"parameter", "module_buffer", "optimizer_state", "input"})


def static_bytes(trace: Mapping[str, Any]) -> int:
    """Parameters, module buffers, optimizer state and batch.

    Args:
        trace: The trace as parsed JSON.
    """
    return sum(a["bytes"] for a in trace["allocations"] if a["category"] in _STATIC)


def optimizer_peak_bytes(trace: Mapping[str, Any]) -> int:
    """Most bytes alive while the optimizer runs; 0 without one.

    Args:
        trace: The trace as parsed JSON.
    """
    ops = trace["ops"]
    start = next((i for i, op in enumerate(ops) if op["phase"] == "optimizer"), len(ops))
    change = [0] * (len(ops) + 2)
    for allocation in trace["allocations"]:
        for first, end in allocation["natural"]:
            if end > start:
                change[max(first, start)] += allocation["bytes"]
                change[end] -= allocation["bytes"]
    alive = peak = 0
    for index in range(start, len(ops)):
        alive += change[index]
        peak = max(peak, alive + ops[index]["workspace_bytes"])
    return peak
