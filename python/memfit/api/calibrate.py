"""Measuring this machine for plans: :func:`memfit.calibrate`."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Literal

from memfit import _native
from memfit.answers import Calibration, save
from memfit.errors import UsageError
from memfit.plan import profiles


def calibrate(
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    seconds: float = 10.0,
    folder: str | PathLike[str] | None = None,
    output: str | PathLike[str] | None = None,
) -> Calibration:
    """Measure what ops cost on this machine, and keep it for plans.

    Args:
        device: Which device of this machine.
        seconds: About how long to measure; fewer large sizes are measured in less.
        folder: Whose disk to measure; the folder for temporary files by default.
        output: The file to write, to be given to plans as ``costs``. By default, one that plans on
            this machine find by themselves.

    Returns:
        The calibration; ``path`` names the file.

    Raises:
        UsageError: There is no such device, or a folder or the file cannot be written.
    """
    path = profiles.default_path(device) if output is None else Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make `{path.parent}`: {error.strerror}") from error
    found = profiles.make(device, seconds=seconds, folder=None if folder is None else Path(folder))
    save(path, (json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
    return Calibration.told(*_native.calibration(found, str(path)))
