"""What a track has seen, as values.

Responsible for the shape of the result, its JSON form and its text. Not responsible for measuring.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit import _native
from memfit.track import cpu, cuda
from memfit.track.looks import Account
from memfit.track.owners import CATEGORIES, OTHER

SCHEMA_VERSION = 1
"""Version of the JSON form."""


@dataclass(slots=True, frozen=True)
class OwnedBytes:
    """Bytes that somebody held.

    Attributes:
        category: What they were.
        owner: Who held them, for a person: a variable and the line at which it was seen.
        blocks: In how many blocks.
        bytes: The bytes.
    """

    category: str
    owner: str
    blocks: int
    bytes: int


@dataclass(slots=True, frozen=True)
class DeviceBytes:
    """Bytes of one device around a piece of code.

    Attributes:
        device: ``cpu``, ``cuda:0`` and so on.
        before_bytes: Allocated bytes at the start.
        after_bytes: Allocated bytes at the end.
        peak_bytes: Most bytes allocated at once in between, those from before included.
        before_by_category: ``before_bytes`` divided.
        after_by_category: ``after_bytes`` divided.
        peak_by_category: ``peak_told_bytes`` divided; ``None`` on CUDA, whose allocator does not
            tell.
        peak_told_bytes: What the account of the peak is of: ``peak_bytes``, or a little less where
            that moment was not seen; ``None`` on CUDA.
        peak_owners: The same by owner, the largest first.
        active_peak_bytes: Peak of active bytes, on CUDA.
        reserved_before_bytes: Reserved bytes at the start, on CUDA.
        reserved_after_bytes: Reserved bytes at the end, on CUDA.
        reserved_peak_bytes: Peak of reserved bytes, on CUDA.
    """

    device: str
    before_bytes: int
    after_bytes: int
    peak_bytes: int
    before_by_category: dict[str, int]
    after_by_category: dict[str, int]
    peak_by_category: dict[str, int] | None
    active_peak_bytes: int | None = None
    reserved_before_bytes: int | None = None
    reserved_after_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    peak_told_bytes: int | None = None
    peak_owners: tuple[OwnedBytes, ...] = ()


@dataclass(slots=True, frozen=True)
class Tracked:
    """The bytes of one tracked piece of code.

    Attributes:
        name: Name of the track.
        devices: One entry for each device in use, the CPU first.
        seconds: Wall time.
        exception: Name of the exception's class that ended it; ``None`` when none did.
        notes: Sentences about what could not be measured.
    """

    name: str
    devices: tuple[DeviceBytes, ...]
    seconds: float
    exception: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def main(self) -> DeviceBytes:
        """The first CUDA device in use; the CPU where there is none.

        Raises:
            LookupError: No device could be measured; :attr:`notes` says why.
        """
        if not self.devices:
            raise LookupError("; ".join(self.notes))
        return next((d for d in self.devices if d.device != "cpu"), self.devices[0])

    def __getitem__(self, device: str) -> DeviceBytes:
        """The bytes of a device, ``t["cuda:0"]``.

        Raises:
            KeyError: No tensor was on that device.
        """
        for found in self.devices:
            if found.device == device:
                return found
        raise KeyError(device)

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON has it; integers are bytes."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def __str__(self) -> str:
        """The record as a table."""
        return _native.track_text(json.dumps(self.as_dict())).rstrip("\n")


def owned(account: Account) -> tuple[OwnedBytes, ...]:
    """Who held what at a peak, as far as it has an owner."""
    return tuple(
        OwnedBytes(one.category, one.owner.name, one.blocks, one.bytes)
        for one in account.holdings
        if one.owner.name
    )


def cpu_bytes(before: cpu.Reading, after: cpu.Reading, account: Account) -> DeviceBytes:
    """The CPU's entry."""
    return DeviceBytes(
        device="cpu",
        before_bytes=before.current_bytes,
        after_bytes=after.current_bytes,
        peak_bytes=after.peak_bytes,
        before_by_category=_ordered(before.current_by_category),
        after_by_category=_ordered(after.current_by_category),
        peak_by_category=_ordered(account.by_category),
        peak_told_bytes=account.bytes,
        peak_owners=owned(account),
    )


def cuda_bytes(
    index: int, reading: cuda.DeviceReading, before: dict[str, int], after: dict[str, int]
) -> DeviceBytes:
    """A CUDA device's entry; ``before`` and ``after`` are the owned bytes by category."""
    return DeviceBytes(
        device=f"cuda:{index}",
        before_bytes=reading.before["allocated"],
        after_bytes=reading.current["allocated"],
        peak_bytes=reading.peak["allocated"],
        before_by_category=_completed(before, reading.before["allocated"]),
        after_by_category=_completed(after, reading.current["allocated"]),
        peak_by_category=None,
        active_peak_bytes=reading.peak["active"],
        reserved_before_bytes=reading.before["reserved"],
        reserved_after_bytes=reading.current["reserved"],
        reserved_peak_bytes=reading.peak["reserved"],
    )


def _ordered(by_category: dict[str, int]) -> dict[str, int]:
    return {category: by_category.get(category, 0) for category in CATEGORIES}


def _completed(owned: dict[str, int], total: int) -> dict[str, int]:
    """The owned bytes and the rest, which rounding up by the allocator makes no smaller."""
    by_category = _ordered(owned)
    by_category[OTHER] = max(0, total - sum(owned.values()))
    return by_category
