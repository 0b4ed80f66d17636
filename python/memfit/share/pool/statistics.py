"""What a pool did so far, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool did so far.

    Attributes:
        uses: Uses granted.
        hits: Uses whose model was awake when it was asked for.
        waits: Uses that were not granted at once.
        wakes: Models woken.
        parks: Models parked.
        bytes_woken: Bytes read by waking.
        bytes_written: Bytes written by parking: to the disk, and on a GPU to the host's memory.
        waited_seconds: What uses waited, together.
        peak_bytes: Most bytes of models and activations at a time.
        spills: Copies moved on from the host's memory to the disk (on a GPU).
        host_peak_bytes: Most bytes of copies in the host's memory at a time (on a GPU).
        releases: Times that torch's free blocks were given back for room (on a GPU).
    """

    uses: int
    hits: int
    waits: int
    wakes: int
    parks: int
    bytes_woken: int
    bytes_written: int
    waited_seconds: float
    peak_bytes: int
    spills: int
    host_peak_bytes: int
    releases: int
