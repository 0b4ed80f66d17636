"""The independent twin of the peak: `pickle.load`, plain dictionaries, one event at a time.

Block sizes follow the rule that replays of real snapshots confirmed: a request rounds up to 512
bytes, and in a large segment it also takes the gap behind it, up to the next address that is known
from anywhere in the file, where that gap is at most 1 MiB.
"""

from __future__ import annotations

import bisect
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

MIB = 1 << 20


class Sizes:
    """Block sizes of one device."""

    def __init__(self, segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> None:
        """Gather every address that the file knows."""
        self.segments = {it["address"]: it["total_size"] for it in segments}
        known = set()
        for event in trace:
            if event["action"].startswith("segment_"):
                self.segments[event["addr"]] = event["size"]
            elif event["action"] != "oom":
                known.add(event["addr"])
        for address, size in self.segments.items():
            known |= {address, address + size}
        for segment in segments:
            known |= {block["address"] for block in segment["blocks"]}
        self.starts, self.known = sorted(self.segments), sorted(known)

    def of(self, address: int, requested: int) -> int:
        rounded = max(512, -(-requested // 512) * 512)
        segment = self.starts[bisect.bisect_right(self.starts, address) - 1]
        if self.segments[segment] == 2 * MIB:
            return rounded
        after = self.known[bisect.bisect_left(self.known, address + rounded)]
        gap = after - (address + rounded)
        return rounded + (gap if gap <= MIB else 0)


def totals(path: Path) -> list[tuple[int, int, int]]:
    """Allocated, active and reserved bytes before the first event and after each."""
    with path.open("rb") as file:
        snapshot = pickle.load(file)  # noqa: S301 - files of this project's own data
    segments, (trace,) = snapshot["segments"], snapshot["device_traces"]
    sizes = Sizes(segments, trace)
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = {it["address"]: it["size"] for it in blocks if it["state"] != "inactive"}
    allocated = {it["address"]: it["size"] for it in blocks if it["state"] == "active_allocated"}
    reserved = sum(segment["total_size"] for segment in segments)
    assert sum(allocated.values()) == sum(segment["allocated_size"] for segment in segments)
    assert sum(active.values()) == sum(segment["active_size"] for segment in segments)
    states = [(sum(allocated.values()), sum(active.values()), reserved)]
    for event in reversed(trace):
        action, address = event["action"], event.get("addr")
        if action == "alloc":
            del allocated[address], active[address]
        elif action == "free_completed":
            active[address] = sizes.of(address, event["size"])
        elif action == "free_requested":
            allocated[address] = active[address]
        elif action == "segment_alloc":
            reserved -= event["size"]
        elif action == "segment_free":
            reserved += event["size"]
        states.append((sum(allocated.values()), sum(active.values()), reserved))
    states.reverse()
    assert all(before[0] <= before[1] <= before[2] for before, _ in pairwise(states))
    return states


def first_highest(values: list[int]) -> tuple[int, int | None]:
    """The highest value and the index of the event after which it is reached."""
    highest = max(values)
    state = values.index(highest)
    return highest, state - 1 if state else None
