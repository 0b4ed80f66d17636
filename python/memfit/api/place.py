"""Static placement: offsets for allocations with known live ranges.

Responsible for the public function and its result. Not responsible for the search (the engine).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memfit import _native
from memfit.errors import UsageError

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
"""What is known: ``infeasible`` is proved, ``unknown`` is not."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where allocations lie in an arena."""

    status: Status
    """What is known about the goal."""
    height: int
    """Bytes of the arena; above the capacity when the status is infeasible or unknown."""
    lower_bound: int
    """No placement takes fewer bytes."""
    stop_reason: str
    """Why the search ended."""
    offsets: dict[str, int]
    """Offset of each allocation by its id, in the order given."""


def place(
    allocations: str | os.PathLike[str] | Mapping[str, tuple[int, int, int]],
    *,
    capacity: int | None = None,
    alignment: int = 1,
    threads: int | None = None,
    time_limit: float | None = None,
) -> Placement:
    """Find offsets so that the arena is as small as possible, or within a capacity.

    Args:
        allocations: A CSV file with the columns ``id``, ``lower``, ``upper``, ``size``; or for each
            id the half-open live range and the bytes: ``(lower, upper, size)``.
        capacity: Any placement within so many bytes will do; ``None`` for the lowest.
        alignment: Offsets are multiples of it where the file does not say otherwise.
        threads: The result is the same with any number; ``None`` for one a core.
        time_limit: Seconds after which the best found is the answer; ``None`` for a limit on work.

    Returns:
        The placement.

    Raises:
        UsageError: The allocations cannot be read or placed.
    """
    if isinstance(allocations, Mapping):
        text = _as_csv(allocations).encode()
    else:
        try:
            text = Path(allocations).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read `{allocations}`: {error.strerror}") from error
    if alignment < 1:
        raise UsageError(f"`alignment` is {alignment}: it is at least 1")
    if capacity is not None and capacity < 0:
        raise UsageError(f"`capacity` is {capacity}: it cannot be negative")
    count = threads or os.cpu_count() or 1
    ids, answer = _native.place(text, capacity, alignment, count, time_limit)
    placed = answer["placement"]
    return Placement(
        status=answer["status"],
        height=placed["height"],
        lower_bound=answer["lower_bound"],
        stop_reason=answer["stop_reason"],
        offsets=dict(zip(ids, placed["offsets"], strict=True)),
    )


def _as_csv(allocations: Mapping[str, tuple[int, int, int]]) -> str:
    lines = ["id,lower,upper,size"]
    for name, (lower, upper, size) in allocations.items():
        if "," in name or "\n" in name or name != name.strip():
            raise UsageError(f"`{name}` is no id: it has a comma, a line end or outer spaces")
        lines.append(f"{name},{lower},{upper},{size}")
    return "\n".join(lines) + "\n"
