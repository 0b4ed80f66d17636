"""Where what is offloaded may go, as people name it.

Responsible for telling a folder from the host's memory. Not responsible for how fast either is
(:mod:`memfit.costs`). Imports no torch: a script may set environment variables before it does.
"""

from __future__ import annotations

from pathlib import Path

from memfit.errors import UsageError

HOST = "host"
"""The name of the host's memory where a folder could be meant; ``./host`` is a folder."""


def place_of(place: str) -> str:
    """Where a place for what is offloaded is, whatever the working folder becomes.

    Args:
        place: A folder, or :data:`HOST`.

    Returns:
        The folder's whole path, or :data:`HOST`.

    Raises:
        UsageError: There is no such folder.
    """
    if place == HOST:
        return HOST
    folder = Path(place).expanduser().resolve()
    if not folder.is_dir():
        message = f"cannot offload to `{place}`: there is no such folder"
        raise UsageError(f"{message}\nhint: make it, or name another")
    return str(folder)
