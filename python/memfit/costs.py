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
def device_profile(device_kind: str) -> dict[str, Any]:
    """What a device of this machine can do, measured once in a process.

    Args:
        device_kind: ``cpu`` or ``cuda``. Without a GPU the CPU stands in for it, since a plan needs
            only the ratios of op times; the profile's name says so.

    Returns:
        A ``DeviceProfile`` of the engine: rates in FLOPs and bytes a second, overhead in seconds.
    """
    import torch

    from memfit.measure import calibrate

    if device_kind == "cuda" and torch.cuda.is_available():
        return dict(calibrate("cuda"))
    profile = dict(calibrate())
    if device_kind != "cpu":
        profile["name"] = f"{profile['name']}, standing in for {device_kind}"
    return profile


def roofline(device_kind: str) -> str:
    """The cost source that needs no run of the model.

    Args:
        device_kind: As in :func:`device_profile`.

    Returns:
        A cost source of the engine, as JSON.
    """
    return json.dumps({"kind": "roofline", "profile": device_profile(device_kind)})


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
