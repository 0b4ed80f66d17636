"""What a person may ask of a plan: how exact, with which techniques, with what place to offload to.

Not responsible for what a technique does nor for how fast a place is
(:mod:`memfit.plan.cost_source`). Imports no torch: a script may set environment variables before it
does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from memfit.errors import UsageError

Allowed = Literal["exact", "equivalent", "approximate"]
"""The loosest class of action that may be considered where a stricter one fits."""

Kind = Literal[
    "remat",
    "fuse_optimizer",
    "micro_batch",
    "allocator_settings",
    "offload",
    "offload_optimizer",
    "offload_parameters",
    "chunk",
]
"""A technique."""

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
