"""What is installed on this machine, as far as it matters to memfit.

Responsible for the facts that only Python knows and for saying each in a sentence where it is not
as it should be. Not responsible for which features work (:mod:`memfit.doctor.trials`), for GPUs'
free memory and the broker (the program asks the driver and the socket itself), nor for the report.

Nothing here fails: what cannot be found out is ``None``, with a reason beside it. Torch is imported
only when memfit supports it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit import torch_names, torch_versions
from memfit.errors import first_line
from memfit.options import HOST
from memfit.plan import profiles

DEVICE_KINDS = ("cpu", "cuda")


def examine(offload: str | None = None) -> dict[str, Any]:
    """Look at Python, torch and the machine.

    Args:
        offload: Folder, or ``host``, whose speed for what is offloaded is measured.

    Returns:
        The facts, ready for JSON; the program's ``Examined`` has the shape.
    """
    refusal = torch_versions.refusal() or _import_failure()
    is_usable = refusal is None
    cuda = _cuda() if is_usable else {"why_not": refusal, "devices": []}
    tools = _tools() if is_usable else []
    absent = _missing_names() if is_usable else []
    features: dict[str, str | None] = {}
    if is_usable:
        from memfit.doctor.trials import trials

        features = trials(offload, cuda["why_not"])
    cache = _cache_folder()
    return {
        "package_folder": str(Path(__file__).parents[1]),
        "python_version": platform.python_version(),
        "python_path": sys.executable,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "glibc_version": platform.libc_ver()[1] or None,
        "processor": profiles.processor(),
        "torch": _torch(is_usable=is_usable),
        "torch_refusal": refusal,
        "cuda": cuda,
        "tools": tools,
        "trials": features,
        "profiles": [_profile(kind, cuda["why_not"], refusal) for kind in DEVICE_KINDS],
        "folders": [cache, _temporary_folder()],
        "offload": None if offload is None else _offload(offload, refusal, cuda["why_not"]),
        "missing_names": absent,
        "remarks": _remarks(absent, cache, is_usable=is_usable),
        "next_step": _next_step(refusal),
    }


def _import_failure() -> str | None:
    """Why a torch of a supported version cannot be imported."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"`import torch` fails: {first_line(error)}"
    if not hasattr(torch, "nn"):
        return f"`{torch.__file__}` is no whole torch: it has no `torch.nn`"
    return None


def _torch(*, is_usable: bool) -> dict[str, Any] | None:
    found = torch_versions.installed()
    if not found:
        return None
    used, *others = found
    facts: dict[str, Any] = {
        "version": used.version,
        "folder": str(used.folder),
        "cuda_version": _built_for(used.folder, "cuda"),
        "rocm_version": _built_for(used.folder, "hip"),
        "others": [{"version": other.version, "folder": str(other.folder)} for other in others],
        "has_onednn": None,
        "has_distributed": None,
    }
    if is_usable:
        facts.update(has_onednn=_has_onednn(), has_distributed=_has_distributed())
    return facts


def _has_onednn() -> bool:
    import torch

    onednn: Any = torch.backends.mkldnn  # types do not know its parts
    return bool(onednn.is_available())


def _has_distributed() -> bool:
    import torch

    return bool(torch.distributed.is_available())


def _built_for(folder: Path, name: str) -> str | None:
    """A version in a torch's ``version.py``, which need not be imported for that."""
    with contextlib.suppress(OSError):
        text = (folder / "version.py").read_text(encoding="utf-8")
        if match := re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return match.group(1)
    return None


def _cuda() -> dict[str, Any]:
    """The devices that torch can use, or why there are none."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of is in the reason
        if not torch.cuda.is_available():
            return {"why_not": _why_no_device(), "devices": []}
        properties = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
    devices = [
        {"device": f"cuda:{index}", "name": of.name, "total_bytes": int(of.total_memory)}
        for index, of in enumerate(properties)
    ]
    return {"why_not": None, "devices": devices}


def _why_no_device() -> str:
    import torch

    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip} and finds no device"
    built = torch.version.cuda
    if built is None:
        return "this torch is built without CUDA"
    start: Any = torch.cuda.init
    try:
        start()
    except (RuntimeError, AssertionError) as error:
        said = first_line(error)
    else:
        said = "it does not say why"
    if "no NVIDIA driver" in said:
        return f"torch is built for CUDA {built}, and there is no NVIDIA driver here"
    if "No CUDA GPUs" in said:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f": `CUDA_VISIBLE_DEVICES` is `{visible}`"
        return f"torch is built for CUDA {built} and sees no device{hidden}"
    return f"torch is built for CUDA {built} and cannot use it: {said.partition('. ')[0]}"


def _tools() -> list[dict[str, Any]]:
    """What Inductor compiles with."""
    from memfit.run.compiled import toolchain

    return [
        {"name": "C++ compiler", **_found(_compiler), "why_not": toolchain.missing("cpu")},
        {"name": "Triton", **_found(_triton), "why_not": None},
    ]


def _found(look: Callable[[], tuple[str, str | None] | None]) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        if (found := look()) is not None:
            return {"version": found[0], "path": found[1]}
    return {"version": None, "path": None}


def _compiler() -> tuple[str, str | None] | None:
    from torch._inductor import cpp_builder

    path = shutil.which(cpp_builder.get_cpp_compiler())
    if path is None:
        return None
    command = [path, "--version"]
    done = subprocess.run(  # noqa: S603 - the compiler that Inductor itself would start
        command, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.splitlines()[0], path


def _triton() -> tuple[str, str | None]:
    return importlib.metadata.version("triton"), None


def _missing_names() -> list[dict[str, Any]]:
    """Names that memfit's source uses and this torch lacks."""
    with contextlib.suppress(Exception):  # a damaged torch: the main job says what is wrong
        absent = torch_names.missing(torch_names.used_names())
        return [{"name": name, "files": list(files)} for name, files in absent.items()]
    return []


def _profile(device_kind: str, no_cuda: str | None, refusal: str | None) -> dict[str, Any]:
    """The kept cost profile of a kind of device, and whether plans use it."""
    facts: dict[str, Any] = {
        "device_kind": device_kind,
        "path": None,
        "calibrated": None,
        "age_days": None,
        "is_used": False,
        "why_not": None,
    }
    try:
        path = profiles.default_path(device_kind)
        facts["path"] = str(path)
        if not path.exists():
            return facts
        facts["calibrated"] = profiles.read(path)["date"]
        made = dt.date.fromisoformat(facts["calibrated"])
        facts["age_days"] = max((dt.datetime.now(tz=dt.UTC).date() - made).days, 0)
        if refusal is not None:
            facts["why_not"] = refusal
        elif device_kind == "cuda" and no_cuda is not None:
            facts["why_not"] = no_cuda
        else:
            found, why_not = profiles.usable(device_kind, None)
            facts.update(is_used=found is not None, why_not=why_not or None)
    except Exception as error:  # noqa: BLE001 - a damaged file, no home: an answer, too
        facts["why_not"] = first_line(error)
    return facts


def _cache_folder() -> dict[str, Any]:
    purpose = "profiles that are kept"
    try:
        folder = profiles.default_path("cpu").parent
    except RuntimeError as error:  # no home
        return {"purpose": purpose, "path": None, "why_not": first_line(error)}
    return {"purpose": purpose, "path": str(folder), "why_not": _why_not_writable(folder)}


def _temporary_folder() -> dict[str, Any]:
    purpose = "offloaded tensors, by default"
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        return {"purpose": purpose, "path": None, "why_not": error.strerror or first_line(error)}
    return {"purpose": purpose, "path": str(folder), "why_not": _why_not_writable(folder)}


def _why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in a folder, or in the one that it would be made in."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        said = error.strerror or first_line(error)
        return f"cannot write to `{place}`: {said[:1].lower()}{said[1:]}"
    return None


def _offload(place: str, refusal: str | None, no_cuda: str | None) -> dict[str, Any]:
    """How fast a place for what is offloaded is."""
    if place == HOST:
        refusal = refusal or no_cuda  # tensors of the CPU are there already
    facts: dict[str, Any] = {
        "place": place,
        "write_bytes_per_second": None,
        "read_bytes_per_second": None,
        "why_not": refusal,
    }
    if refusal is not None:
        return facts
    from memfit.plan import cost_source

    try:
        device_kind = "cuda" if place == HOST else "cpu"
        profile = cost_source.device_profile(device_kind) if place == HOST else {}
        offer = cost_source.offer(device_kind, place, profile)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return {**facts, "why_not": first_line(error)}
    rates = ("write_bytes_per_second", "read_bytes_per_second")
    return {**facts, **{rate: offer[rate] for rate in rates}}


def _remarks(absent: list[dict[str, Any]], cache: dict[str, Any], *, is_usable: bool) -> list[str]:
    """What a person should know of this torch and this machine, a sentence each."""
    said = torch_versions.remarks()
    if cache["why_not"] is not None:
        said.append(
            "profiles cannot be kept here: write one with `memfit calibrate --output FILE.json`, "
            "and plan with `memfit plan --costs FILE.json`"
        )
    found = torch_versions.installed()
    if found and re.search(r"\.dev|a\d+\+git|\+git", found[0].version):
        said.append(
            f"torch {found[0].version} is a nightly build: memfit is tested with releases only"
        )
    said += [f"this torch has no `{name['name']}`, which memfit uses" for name in absent]
    if not is_usable:
        return said
    if not _has_distributed():
        said.append("this torch is built without distributed, which memfit does not need")
    if not _has_onednn():
        said.append(
            "this torch has no oneDNN: memfit works without it, but how much scratch memory ops "
            "take was tested only with it"
        )
    return said


def _next_step(refusal: str | None) -> str | None:
    """What to do about a torch that memfit cannot work with."""
    if refusal is None:
        return None
    found = torch_versions.installed()
    if not found:
        return "install torch: `pip install torch`"
    oldest = torch_versions.OLDEST
    for other in found[1:]:
        if (torch_versions.minor(other.version) or (0, 0)) >= oldest:
            return (
                f"take `{found[0].folder.parent}` off Python's path, and torch {other.version} in "
                f"`{other.folder}` is used"
            )
    if torch_versions.refusal() is not None:
        return f"install a later torch: `pip install 'torch>={oldest[0]}.{oldest[1]}'`"
    return "install torch again: `pip install --force-reinstall torch`"
