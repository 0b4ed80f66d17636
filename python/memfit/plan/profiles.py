"""Device profiles as files: what ``memfit calibrate`` keeps and plans use.

Responsible for the file's shape and place, for making one, and for whether it is of this machine.
Not responsible for how things are measured (:mod:`memfit.measure`) nor for what the numbers mean
(the engine's cost model).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from memfit.errors import UsageError

SCHEMA_VERSION = 1
"""Version of the file's shape; files of a later one are refused."""

WIDE_SPREAD = 0.5
"""From here on the report warns: half of the runs took this much longer than the fastest."""

_DISK_BYTES = 64 << 20
_SHARE_OF_COPIES = 0.1

DeviceKind = Literal["cpu", "cuda"]


def default_path(device_kind: str) -> Path:
    """Where the profile of this machine is kept: below ``XDG_CACHE_HOME``, else ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return folder / "memfit" / f"{device_kind}.json"


def identity(device_kind: str) -> dict[str, Any]:
    """What a profile must agree with to be of this machine.

    Args:
        device_kind: ``cpu`` or ``cuda``.

    Returns:
        Device kind, device name, torch version and number of threads.
    """
    import torch

    name = torch.cuda.get_device_name() if device_kind == "cuda" else processor()
    return {
        "device_kind": device_kind,
        "device_name": name,
        "torch_version": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """The processor's own name, and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {cores} cores"


def make(
    device_kind: DeviceKind = "cpu", *, seconds: float = 10.0, folder: Path | None = None
) -> dict[str, Any]:
    """Measure a device of this machine.

    Args:
        device_kind: ``cpu`` or ``cuda``.
        seconds: About how long to spend; fewer large sizes are measured in less.
        folder: Whose disk to measure; the folder for temporary files by default.

    Returns:
        The profile file as a JSON object.

    Raises:
        UsageError: There is no such device, or the folder cannot be written to.
    """
    import torch

    from memfit.measure import calibrate, curves, transfers

    if device_kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is here: `memfit plan --gpu NAME` uses a datasheet")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"`{seconds}` is no number of seconds to measure for")
    began = time.perf_counter()
    device = torch.device(device_kind)
    place = folder or Path(tempfile.gettempdir())
    # First, as it is quick and most likely to fail.
    disk, method = transfers.disk(place, min(_DISK_BYTES, int(seconds * (16 << 20))))
    copies = transfers.host_device(device, _SHARE_OF_COPIES * seconds)
    with torch.no_grad():
        flat = calibrate(device_kind)
        samples = list(curves.measure(device, (1 - _SHARE_OF_COPIES) * seconds))
    moved = {**copies, **disk}
    spreads = [sample.spread for sample in samples] + [spread for _, spread in moved.values()]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "device_profile",
        **identity(device_kind),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "seconds": time.perf_counter() - began,
        "disk": {"folder": str(place), "method": method},
        "median_spread": sorted(spreads)[len(spreads) // 2],
        "warnings": _warnings(spreads),
        "samples": [
            {
                "what": sample.what,
                sample.unit: sample.work,
                "seconds": sample.seconds,
                "per_second": sample.work / sample.seconds,
                "spread": sample.spread,
                "runs": sample.runs,
            }
            for sample in samples
        ],
        "profile": {
            **flat,
            "curves": _curves(samples),
            "transfers": {what: rate for what, (rate, _) in moved.items()},
        },
    }


def _curves(samples: list[Any]) -> dict[str, Any]:
    """The samples as the engine's curves."""
    compute: dict[str, dict[str, list[dict[str, float]]]] = {}
    memory: dict[str, list[dict[str, float]]] = {}
    for sample in samples:
        if sample.unit == "flops":
            kind, _, dtype = sample.what.partition(".")
            points = compute.setdefault(kind, {}).setdefault(dtype, [])
        else:
            points = memory.setdefault(sample.what, [])
        points.append({"work": float(sample.work), "seconds": sample.seconds})
    return {"compute": compute, "memory": memory}


def _warnings(spreads: list[float]) -> list[str]:
    wide = sum(spread > WIDE_SPREAD for spread in spreads)
    if wide * 4 <= len(spreads):
        return []
    message = (
        f"{wide} of {len(spreads)} measurements spread by more than {WIDE_SPREAD:.0%}: "
        "the machine is busy; calibrate again when it is idle"
    )
    return [message]


def read(path: Path) -> dict[str, Any]:
    """Read a profile file.

    Args:
        path: The file.

    Returns:
        The file as a JSON object, checked.

    Raises:
        UsageError: It cannot be read or is no profile this version knows.
    """
    again = "hint: write it again with `memfit calibrate`"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}\n{again}") from error
    except ValueError as error:
        raise UsageError(f"`{path}` is no device profile: {error}\n{again}") from error
    if not isinstance(found, dict) or found.get("kind") != "device_profile":
        raise UsageError(f"`{path}` is no device profile\n{again}")
    version = found.get("schema_version")
    if version != SCHEMA_VERSION:
        message = f"`{path}` has schema version {version}, this memfit reads {SCHEMA_VERSION}"
        raise UsageError(f"{message}\n{again}")
    wanted = {"device_kind": str, "device_name": str, "torch_version": str, "threads": int}
    for key, kind in {**wanted, "date": str, "profile": dict}.items():
        if not isinstance(found.get(key), kind):
            raise UsageError(f"`{path}` is no device profile: `{key}` is missing\n{again}")
    _check(path, found["profile"], again)
    return found


def _check(path: Path, profile: dict[str, Any], again: str) -> None:
    """Let the engine read the numbers: it is the one to use them."""
    from memfit._native import check_profile

    try:
        check_profile(profile)
    except UsageError as error:
        reason = str(error).removeprefix("the device profile is not valid: ")
        raise UsageError(f"`{path}` is no device profile: {reason}\n{again}") from error


def usable(device_kind: str, path: Path | None) -> tuple[dict[str, Any] | None, str]:
    """The profile that plans for a device kind should use.

    A file that is named is used whatever machine it is of, and its name then says which. The one at
    :func:`default_path` is used only when device, torch version and threads agree.

    Args:
        device_kind: ``cpu`` or ``cuda``, as the trace has it.
        path: The file named; ``None`` for the default one.

    Returns:
        The engine's profile, or ``None`` with why there is none (empty when nothing was kept).

    Raises:
        UsageError: A file that cannot be read, or is of another kind of device.
    """
    named = path is not None
    path = path or default_path(device_kind)
    if not named and not path.exists():
        return None, ""
    found = read(path)
    if found["device_kind"] != device_kind:
        message = f"`{path}` is of a {found['device_kind']} device, the step runs on {device_kind}"
        raise UsageError(message)
    differs = _differences(found)
    if differs and not named:
        return None, f"the calibrated profile has another {differs}"
    whose = f"{found['device_name']}, not this machine" if differs else "this machine"
    name = f"profile of {whose}, calibrated {found['date']}"
    return {**found["profile"], "name": name}, ""


def _differences(found: dict[str, Any]) -> str:
    """Which properties are not those of this machine, for people; empty when it is this machine."""
    import torch

    if found["device_kind"] == "cuda" and not torch.cuda.is_available():
        return "device"
    words = {"device_name": "device", "torch_version": "torch version", "threads": "thread count"}
    here = identity(found["device_kind"])
    return " and ".join(word for key, word in words.items() if found[key] != here[key])
