"""A plan's ``remat``, ``unneeded_saves``, ``offload`` and ``shrink`` actions, read and checked.

Responsible for what they say to the executor. Not responsible for doing it
(:mod:`memfit.apply.remat.remat`).
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.apply.remat.records import NO_HOME, Goal
from memfit.errors import UsageError

_LISTS: Mapping[str, Mapping[Goal | None, str]] = {
    "remat": {None: "drops"},
    "unneeded_saves": {None: "drops"},
    "offload": {"offload": "stores"},
    "shrink": {"half": "half", "eight_bit": "eight_bit"},
}
"""By kind of action and by where outputs go, the name of their list."""


@dataclass(slots=True, frozen=True)
class Region:
    """A module call that is watched.

    Attributes:
        module: Module path; empty for the whole forward, the loss included.
        call: How many times the module had been entered before.
        start: Index of its first op in forward.
        end: One past its last.
    """

    module: str
    call: int
    start: int
    end: int


@dataclass(slots=True, frozen=True)
class Planned:
    """An output of an op that the plan does not keep.

    Attributes:
        elements: Elements planned.
        home: Forward op from which on requests let it pass.
        goes_to: Where it goes, to come back from there: ``offload``, or a form it is held in,
            ``half`` or ``eight_bit``; ``None`` where it is dropped.
    """

    elements: int
    home: int
    goes_to: Goal | None


@dataclass(slots=True)
class Directions:
    """A plan's actions on activations, ready to be followed.

    Attributes:
        planned: By op of forward: position among the tensors it returns, to what happens to it.
        regions: The module calls to watch.
        forward: Name of each op of forward.
        order: Stored allocations in the order of fetching ahead, as op and output.
        window_bytes: Most bytes on their way out, and most fetched ahead.
    """

    planned: dict[int, dict[int, Planned]]
    regions: tuple[Region, ...]
    forward: tuple[str, ...]
    order: tuple[tuple[int, int], ...] = ()
    window_bytes: int = 0
    _ends: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    @staticmethod
    def read(given: Mapping[str, Mapping[str, Any]]) -> Directions:
        """Read what the plan's actions say of activations.

        Args:
            given: By kind (``remat``, ``unneeded_saves``, ``offload``, ``shrink``), what the
                executor needs of it, as parsed JSON; one of them at least.

        Raises:
            UsageError: They are no such things, contradict each other, or watch different forwards.
        """
        offload = given.get("offload")
        kinds = " and ".join(f"`{kind}`" for kind in given)
        try:
            planned = _planned(given)
            watched = [_watched(part) for part in given.values()]
            order, window_bytes = _fetching(offload) if offload is not None else ((), 0)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = f"what the plan says of {kinds} is malformed: {error!r}"
            raise UsageError(message) from error
        regions, forward = watched[0]
        if any(other != watched[0] for other in watched):
            raise UsageError(f"the plan's actions {kinds} watch different forwards")
        if any(not 0 <= r.start <= r.end <= len(forward) for r in regions):
            message = f"what the plan says of {kinds} names a region outside forward"
            raise UsageError(message)
        return Directions(planned, regions, forward, order, window_bytes)

    def after(self, names: tuple[str, ...], start: int) -> int | None:
        """Index of the op that follows the first run of ``names`` in forward from ``start`` on.

        Args:
            names: Names of some ops in a row; as many in every call.
            start: Where the run may begin.
        """
        if not self._ends:
            for end in range(len(names), len(self.forward) + 1):
                self._ends.setdefault(self.forward[end - len(names) : end], []).append(end)
        ends = self._ends.get(names, [])
        position = bisect_left(ends, start + len(names))
        return ends[position] if position < len(ends) else None


def _planned(given: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[int, Planned]]:
    """What happens to outputs of ops, by op and position."""
    planned: dict[int, dict[int, Planned]] = {}
    for kind, part in given.items():
        for goal, name in _LISTS[kind].items():
            for entry in part[name]:
                home = entry.get("home")
                outputs = planned.setdefault(entry["op"], {})
                if entry["output"] in outputs:
                    message = f"the plan names output {entry['output']} of op {entry['op']} twice"
                    raise UsageError(message)
                outputs[entry["output"]] = Planned(
                    math.prod(entry["shape"]), NO_HOME if home is None else int(home), goal
                )
    return planned


def _watched(part: Mapping[str, Any]) -> tuple[tuple[Region, ...], tuple[str, ...]]:
    """Where to watch, and the ops to expect."""
    names = part["names"]
    regions = (Region(r["module"], r["call"], r["start"], r["end"]) for r in part["active"])
    return tuple(regions), tuple(sys.intern(names[index]) for index in part["forward"])


def _fetching(offload: Mapping[str, Any]) -> tuple[tuple[tuple[int, int], ...], int]:
    """In which order stored allocations are fetched ahead, and the window."""
    stores = [(entry["op"], entry["output"]) for entry in offload["stores"]]
    order = tuple(stores[index] for index in offload.get("order", ()))
    return order, int(offload["window_bytes"])
