"""A profile of the device, made by `memfit calibrate` as people do.

Responsible for calling it once for a piece and for keeping its file in the piece's scratch folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import memfit_json

FULL_SECONDS, SMALL_SECONDS = 15, 1


def calibrate(kind: str, scratch: Path, *, small: bool) -> tuple[Path, dict[str, Any]]:
    """Measure the device.

    Args:
        kind: ``cpu`` or ``cuda``.
        scratch: Where the file goes, and whose disk is measured.
        small: Whether this is a rehearsal.

    Returns:
        The file, and what the command says.
    """
    file = scratch / f"{kind}-profile.json"
    seconds = str(SMALL_SECONDS if small else FULL_SECONDS)
    where = ["--device", kind, "--folder", str(scratch), "--output", str(file)]
    return file, memfit_json("calibrate", *where, "--seconds", seconds)
