"""Where ``memfit run`` offloads to when nobody has said.

Responsible for the folder. Not responsible for whether anything is offloaded
(:mod:`memfit.run.script.recorded_step`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.apply.offload.tiers import open_tier
from memfit.errors import MemfitError
from memfit.options import HOST
from memfit.run.script.request import FitRequest

LEAST_FREE_BYTES = 1 << 30
"""A folder with less room is left to others."""

LEAST_STATE_BYTES = 4096
"""Smaller state stays, as in the engine's plans (``technique/offload_optimizer.rs``)."""


def chosen_place() -> str | None:
    """The first usual folder whose files take no memory and that has room; ``None`` without."""
    for folder in _usual():
        try:
            if shutil.disk_usage(folder).free >= LEAST_FREE_BYTES:
                open_tier("disk", 0, folder)
                return str(folder)
        except (MemfitError, OSError):
            continue
    return None


def state_elsewhere(request: FitRequest, state_bytes: int) -> dict[str, Any] | None:
    """A plan that keeps an optimizer's state elsewhere, before any other is known.

    Args:
        request: Which plans are allowed, and where they may offload to.
        state_bytes: How much there will be.

    Returns:
        The plan as parsed JSON; ``None`` where the state has to stay, or no place has room.
    """
    place = request.options.place or (chosen_place() if request.may_choose_place else None)
    if place is None or "offload_optimizer" in request.options.forbid:
        return None
    if place != HOST and state_bytes > free_bytes(place):
        return None
    directions: dict[str, Any] = {
        "tier": "host" if place == HOST else "disk",
        "folder": "" if place == HOST else place,
        "window_bytes": 0,
        "least_bytes": LEAST_STATE_BYTES,
        "order": [],
    }
    return {"actions": [{"kind": "offload_optimizer", "offload_optimizer": directions}]}


def free_bytes(place: str) -> int:
    """How much may be offloaded to a folder: half of its room is left to others."""
    try:
        return shutil.disk_usage(place).free // 2
    except OSError:
        return 0


def _usual() -> Iterator[Path]:
    """Folders for files that nobody keeps."""
    yield Path(tempfile.gettempdir())
    yield Path("/var/tmp")  # noqa: S108 - files have no name
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
