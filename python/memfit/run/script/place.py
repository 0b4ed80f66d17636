"""Where ``memfit run`` offloads to when nobody has said.

Responsible for the place: the host's memory for what is on a GPU, which copies many times faster
than a disk writes, else a folder. Not responsible for whether anything is offloaded
(:mod:`memfit.run.script.recorded_step`).
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memfit.apply.offload.tiers import open_tier
from memfit.capture.probe.workspace import available_bytes
from memfit.errors import MemfitError
from memfit.options import HOST
from memfit.run.script.request import FitRequest

LEAST_FREE_BYTES = 1 << 30
"""A place with less room is left to others."""

LEAST_STATE_BYTES = 4096
"""Smaller state stays, as in the engine's plans (``technique/offload_optimizer.rs``)."""


def chosen_place(device_kind: str) -> str | None:
    """The host's memory for a GPU; else the first usual folder on a disk; ``None`` without room.

    Args:
        device_kind: ``cpu`` or ``cuda``: where the model is.
    """
    if device_kind == "cuda" and available_bytes() >= LEAST_FREE_BYTES:
        return HOST
    for folder in _usual():
        try:
            if shutil.disk_usage(folder).free >= LEAST_FREE_BYTES:
                open_tier("disk", 0, folder)
                return str(folder)
        except (MemfitError, OSError):
            continue
    return None


def chosen(place: str) -> str:
    """What is said of a place that memfit chose."""
    files = f"files in `{place}`, which are gone afterwards"
    where = "the host's memory" if place == HOST else files
    return f"what lacks room is offloaded to {where}; `--no-offload` forbids it"


def strays_to(request: FitRequest, device_kind: str) -> str:
    """Where all goes that is saved after a pass has left its plan; empty for nowhere.

    Args:
        request: Where plans may offload to.
        device_kind: ``cpu`` or ``cuda``: where the model is.
    """
    may_choose = request.may_choose_place
    return request.options.place or (_chosen_once(device_kind) if may_choose else "") or ""


def folder_of_files(request: FitRequest) -> str:
    """A folder on a disk for what has the CPU's memory; empty for none.

    Args:
        request: Where plans may offload to.
    """
    place = strays_to(request, "cpu")
    return place if takes_files(place) else ""


@functools.cache
def takes_files(place: str) -> bool:
    """Whether files in a place are on a disk, and not in memory; no place takes none.

    Args:
        place: As :func:`strays_to` says.
    """
    if place in ("", HOST):
        return False
    try:
        open_tier("disk", 0, place)
    except MemfitError:
        return False
    return True


@functools.cache
def _chosen_once(device_kind: str) -> str | None:
    """The place that was chosen first: it is asked for before each step."""
    return chosen_place(device_kind)


def state_elsewhere(
    request: FitRequest, state_bytes: int, device_kind: str, order: Sequence[str] = ()
) -> dict[str, Any] | None:
    """A plan that keeps an optimizer's state elsewhere, before any other is known.

    Args:
        request: Which plans are allowed, and where they may offload to.
        state_bytes: How much there will be.
        device_kind: ``cpu`` or ``cuda``: where it would be.
        order: Names of parameters in the order of their updates, each as often as it has slices.

    Returns:
        The plan as parsed JSON; ``None`` where the state has to stay, or no place has room.
    """
    may_choose = request.may_choose_place
    place = request.options.place or (chosen_place(device_kind) if may_choose else None)
    if place is None or "offload_optimizer" in request.options.forbid:
        return None
    if state_bytes > free_bytes(place):
        return None
    directions: dict[str, Any] = {
        "tier": "host" if place == HOST else "disk",
        "folder": "" if place == HOST else place,
        "window_bytes": 0,
        "least_bytes": LEAST_STATE_BYTES,
        "order": list(order),
    }
    return {"actions": [{"kind": "offload_optimizer", "offload_optimizer": directions}]}


def free_bytes(place: str) -> int:
    """How much may be offloaded to a place: half of its room is left to others."""
    if place == HOST:
        return available_bytes() // 2
    try:
        return shutil.disk_usage(place).free // 2
    except OSError:
        return 0


def _usual() -> Iterator[Path]:
    """Folders for files that nobody keeps."""
    yield Path(tempfile.gettempdir())
    yield Path("/var/tmp")  # noqa: S108 - files have no name
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
