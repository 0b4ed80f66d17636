"""What tensors that leave and come back cost a compiled step.

Responsible for the time that transfers add to a schedule: what they take from the device that
computes, and the waits where computing is ahead of them. Not responsible for which tensors leave
(:mod:`memfit.run.compiled.search`) or where graphs wait (:mod:`memfit.run.compiled.schedule`).

The model is that of the engine for eager steps
(``crates/memfit-engine/src/plan/search/transfers.rs``): one transfer at a time, in the order they
are asked for. On a device without memory of its own the same cores compute and copy, so each byte
also costs what they do with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from memfit.run.compiled.inductor.rates import Place
from memfit.run.compiled.joint import Joint
from memfit.run.compiled.schedule import Schedule

REQUEST_SECONDS = 5e-5
"""Time that computing loses for one transfer, whatever its size."""

_BYTES_MOVED = 7
"""Of memory, for a byte that leaves and comes back: either way a checksum reads it and a copy reads
and writes it, and the kernel clears the memory that it comes back to. At 0.44 ms of a core for each
MiB, as measured of :class:`memfit.apply.offload.tiers.DiskTier`, that is 17 GB/s."""


def lost_seconds(joint: Joint, made: Schedule, op_seconds: Sequence[float], place: Place) -> float:
    """Seconds that the transfers of a schedule add to its step.

    Args:
        joint: The graph.
        made: The schedule.
        op_seconds: Of each op of the graph, how long it runs.
        place: Where tensors go.
    """
    step = _Step(joint, place)
    step.forward(made, op_seconds)
    step.backward(made, op_seconds)
    transfers = 2 * len(made.settled)
    moved_bytes = _BYTES_MOVED * made.away_bytes if joint.device_kind == "cpu" else 0
    handled = moved_bytes / place.rates.bytes_per_second
    return step.waited + handled + transfers * REQUEST_SECONDS


class _Step:
    """A step in time: the device that computes, and the channel that tensors move through."""

    def __init__(self, joint: Joint, place: Place) -> None:
        self._joint = joint
        self._place = place
        self._now = 0.0
        self._free = 0.0
        """When the channel has moved all that it was asked to move so far."""
        self.waited = 0.0

    def forward(self, made: Schedule, op_seconds: Sequence[float]) -> None:
        sends, waits = defaultdict(list), defaultdict(list)
        for at in made.settled:
            sends[self._joint.tensors[at.tensor].op].append(at.tensor)
            waits[at.position].append(at.tensor)
        moved: dict[int, float] = {}
        for position, op in enumerate(made.forward):
            self._now += op_seconds[op]
            self._wait(moved[tensor] for tensor in waits[position])
            for tensor in sends[op]:
                moved[tensor] = self._move(tensor, self._place.write_bytes_per_second)
        self._wait(moved[tensor] for tensor in waits[len(made.forward)])

    def backward(self, made: Schedule, op_seconds: Sequence[float]) -> None:
        order = [call.fetched for call in made.calls if call.fetched is not None]
        moved: dict[int, float] = {}
        count = 0
        for call in made.calls:
            if call.fetched is None:
                self._now += op_seconds[call.op]
                continue
            for tensor in order[count : count + 2]:  # it and the next, as a graph's fetch begins
                if tensor not in moved:
                    moved[tensor] = self._move(tensor, self._place.read_bytes_per_second)
            self._wait([moved[call.fetched]])
            count += 1

    def _move(self, tensor: int, rate: float) -> float:
        """When a transfer that is asked for now ends."""
        size = self._joint.storages[self._joint.tensors[tensor].storage].bytes
        self._free = max(self._free, self._now) + size / rate
        return self._free

    def _wait(self, until: Iterable[float]) -> None:
        for moment in until:
            self.waited += max(moment - self._now, 0.0)
            self._now = max(moment, self._now)
