"""Where a plan's op times come from.

Responsible for choosing among the cost sources and saying them as the engine does: a
calibrated profile, the datasheet of a GPU, or a quick roofline of this machine. Not responsible for
measuring (:mod:`memfit.measure`), for the op times of a real step (:mod:`memfit.run.profile`), nor
for profile files (:mod:`memfit.plan.profiles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memfit._native import gpu_profile
from memfit.errors import UsageError
from memfit.options import HOST, place_of
from memfit.plan import profiles


@cache
def quick(device_kind: str) -> dict[str, Any]:
    """What a device of this machine can do, measured in under a second, once in a process.

    Args:
        device_kind: ``cpu`` or ``cuda``.
    """
    from memfit.measure import calibrate  # imports torch

    return dict(calibrate(device_kind))


def device_profile(device_kind: str, file: Path | None = None) -> dict[str, Any]:
    """What a device can do.

    Args:
        device_kind: ``cpu`` or ``cuda``.
        file: A profile that ``memfit calibrate`` wrote. By default the one kept for this machine
            if it matches; else a quick measurement; else, for CUDA without a GPU, a datasheet.

    Returns:
        A ``DeviceProfile`` of the engine; its name says which.

    Raises:
        UsageError: The file cannot be read, or is of another kind of device.
    """
    import torch

    found, why_not = profiles.usable(device_kind, file)
    if found is not None:
        return found
    if device_kind == "cuda" and not torch.cuda.is_available():
        return gpu_profile(None)
    profile = dict(quick(device_kind))
    if why_not:
        profile["name"] = f"{profile['name']}; {why_not}"
    return profile


def roofline(device_kind: str, file: Path | None = None, gpu: str | None = None) -> dict[str, Any]:
    """The cost source that needs no run of the model.

    Args:
        device_kind: As in :func:`device_profile`.
        file: As in :func:`device_profile`.
        gpu: Name of a GPU whose datasheet to use instead.

    Returns:
        A cost source of the engine.

    Raises:
        UsageError: As in :func:`device_profile`, or no datasheet of such a GPU is known.
    """
    profile = device_profile(device_kind, file) if gpu is None else gpu_profile(gpu)
    return {"kind": "roofline", "profile": profile}


def with_rates(op_times: Mapping[str, Any], device_kind: str) -> dict[str, Any]:
    """Op times of a real step, with how fast the device computes in other types than the step's.

    Args:
        op_times: As :func:`memfit.run.profile.profiled` returns them.
        device_kind: As in :func:`device_profile`.

    Returns:
        A cost source of the engine.
    """
    return {**op_times, "flops_per_second": quick(device_kind)["flops_per_second"]}


_PROBE_BYTES = 64 << 20


@cache
def _disk(folder: Path) -> dict[str, float]:
    """How fast files in a folder are written and read, measured once in a process."""
    from memfit.measure import transfers

    rates, _ = transfers.disk(folder, _PROBE_BYTES)
    return {what: rate for what, (rate, _) in rates.items()}


def offer(device_kind: str, place: str, profile: Mapping[str, Any]) -> dict[str, Any]:
    """How fast bytes move to and from a place for what is offloaded.

    Args:
        device_kind: ``cpu`` or ``cuda``, as the trace has it.
        place: A folder, whose disk is measured in about a second; or :data:`HOST`.
        profile: A ``DeviceProfile`` of the engine that may know the rates of the host's memory.

    Returns:
        An ``Offer`` of the engine.

    Raises:
        UsageError: The folder cannot be used, the step runs in the host's memory already, or how
            fast copies to it are is not known.
    """
    if place == HOST:
        return _host_offer(device_kind, profile)
    folder = place_of(place)
    rates = _disk(Path(folder))
    return {
        "tier": "disk",
        "folder": folder,
        "write_bytes_per_second": rates["disk_write"],
        "read_bytes_per_second": rates["disk_read"],
    }


def _host_offer(device_kind: str, profile: Mapping[str, Any]) -> dict[str, Any]:
    if device_kind == "cpu":
        raise UsageError(
            "the step runs in the host's memory: offloading there frees nothing\n"
            "hint: name a folder, for files"
        )
    transfers = profile.get("transfers") or {}
    write, read = transfers.get("device_to_host_pinned"), transfers.get("host_to_device_pinned")
    if not write or not read:
        source = f": {profile['name']}, does not say" if profile.get("name") else ""
        raise UsageError(
            f"how fast copies between the host and the device are is not known{source}\n"
            "hint: measure it where the GPU is, `memfit calibrate --device cuda --output FILE`, "
            "and give `--costs FILE`; or name a GPU whose datasheet says it: `--gpu H100`"
        )
    return {
        "tier": "host",
        "folder": "",
        "write_bytes_per_second": write,
        "read_bytes_per_second": read,
    }
