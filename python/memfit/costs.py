"""Where a plan's op times come from.

Responsible for the two cost sources as the engine's JSON: a roofline of this machine, measured
once, or the op times of one real step. Not responsible for measuring (:mod:`memfit.measure`).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from memfit._native import Trace
from memfit.workload import Workload


@cache
def device_profile() -> dict[str, Any]:
    """What this machine can do, measured once in a process.

    Returns:
        A ``DeviceProfile`` of the engine: rates in FLOPs and bytes a second, overhead in seconds.
    """
    from memfit.measure import calibrate  # imports torch

    return dict(calibrate())


def roofline() -> str:
    """The cost source that needs no run of the model, as JSON."""
    return json.dumps({"kind": "roofline", "profile": device_profile()})


def profiled(workload: Workload, trace: Trace) -> str:
    """The cost source of one real, profiled step, as JSON.

    Args:
        workload: The workload that the trace is of; its step really runs.
        trace: The trace.

    Returns:
        Seconds of each op of the trace.
    """
    from memfit.measure import profile_ops  # imports torch

    seconds = profile_ops(workload, json.loads(trace.json()))
    return json.dumps({"kind": "profile", "op_seconds": list(seconds)})
