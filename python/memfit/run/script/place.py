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

from memfit.apply.offload.tiers import open_tier
from memfit.errors import MemfitError

LEAST_FREE_BYTES = 1 << 30
"""A folder with less room is left to others."""


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
