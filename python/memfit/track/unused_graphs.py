"""Graphs that went before any backward ran, as of a validation with gradients on.

Responsible for telling so of what graphs held when it was looked at. Not responsible for graphs
that wait while a backward runs (:mod:`memfit.track.idle_graphs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit import _native

_NEARLY_ALL = 0.9
_MOST_RECORDS = 64


@dataclass(slots=True, frozen=True)
class Unused:
    """What the graph of a variable held, and let go with no backward begun.

    Attributes:
        owner: The number of the graph's owner.
        bytes: What it held.
        first: Number of the event by which its oldest block came.
        last: Number of the last event before it was seen to be gone.
    """

    owner: int
    bytes: int
    first: int
    last: int


class UnusedGraphs:
    """Those of one process.

    Attributes:
        found: The largest.
    """

    def __init__(self) -> None:
        """Know none yet."""
        self.found: list[Unused] = []
        self._held: dict[tuple[int, int], tuple[int, int]] = {}

    def looked(self, held: Mapping[int, tuple[int, int]]) -> None:
        """What is live was looked at, and no backward runs.

        Args:
            held: Owner and bytes of each block that graphs alone hold, by address.
        """
        self.settle()
        # An address may be given to another block.
        self._held = {it: held[it[0]] for it in _live() if it[0] in held}

    def settle(self) -> None:
        """Learn what has gone since the last look; a backward begins now, or none ever will."""
        held, self._held = self._held, {}
        if not held:
            return
        live, now = _live(), _native.last_event()
        for owner in {owner for owner, _ in held.values()}:
            own = {it: size for it, (of, size) in held.items() if of == owner}
            gone_bytes = sum(size for it, size in own.items() if it not in live)
            if gone_bytes >= _NEARLY_ALL * sum(own.values()):
                first = min(born for _, born in own)
                self.found.append(Unused(owner, gone_bytes, first, now))
        self.found.sort(key=lambda it: -it.bytes)
        del self.found[_MOST_RECORDS:]


def _live() -> set[tuple[int, int]]:
    """Address of each block that is live, and the event by which it came."""
    blocks = _native.survivors(0, _native.last_event() + 1, with_models=True)
    return {(address, born) for address, _, born in blocks}
