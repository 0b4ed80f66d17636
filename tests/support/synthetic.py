"""Snapshots made to measure, as `torch.cuda.memory._snapshot()` would return them.

A made-up training loop: each step allocates activations forward and frees them backward, with a
temporary beside each, and may leave something behind. Every address holds one layer's tensor, so
the trace agrees with itself and with the segments at its end. Sizes and stacks are drawn with a
fixed seed. Addresses are not those that PyTorch's allocator would choose.

    python tests/support/synthetic.py 1000000 snapshot.pickle
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

BASE = 0x7F00_0000_0000
SLOT_BYTES = 8 << 20
SEGMENT_SLOTS = 16
START_US = 1_772_552_894_612_000


@dataclass(frozen=True)
class Shape:
    """How large, and which quirks."""

    events: int = 1000
    layers: int = 60
    stacks: int = 120
    shallowest: int = 20
    deepest: int = 38
    """Frames of a stack; 20 to 38 make 155 bytes an event."""
    kept_per_step: int = 0
    """Allocations that each step leaves behind."""
    skipped: int = 0
    """Events that the ring buffer has forgotten."""
    seed: int = 7


@dataclass(frozen=True)
class Row:
    """One event; `stack` is a number, -1 for none."""

    action: str
    address: int
    size: int
    time_us: int
    stack: int


def frames_of(shape: Shape) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Distinct frames, and stacks as numbers of frames."""
    random_numbers = random.Random(shape.seed)
    frames: list[dict[str, Any]] = [
        {"name": f"function_{i}", "filename": f"/code/module_{i % 37}.py", "line": 10 + i}
        for i in range(400)
    ]
    stacks = [
        random_numbers.sample(
            range(len(frames)), random_numbers.randint(shape.shallowest, shape.deepest)
        )
        for _ in range(shape.stacks)
    ]
    return frames, stacks


def rows(shape: Shape) -> Iterator[Row]:
    """The events, without those that the ring buffer has forgotten."""
    for number, row in enumerate(all_rows(shape)):
        if number >= shape.skipped:
            yield row
        if number + 1 == shape.events + shape.skipped:
            return


def all_rows(shape: Shape) -> Iterator[Row]:
    """Events without end."""
    random_numbers = random.Random(shape.seed)
    sizes = [random_numbers.randint(1, SLOT_BYTES // 512) * 512 - 4 for _ in range(shape.layers)]
    time_us = START_US
    kept = 0

    def three(slot: int, size: int, stack: int) -> tuple[Row, Row, Row]:
        nonlocal time_us
        address = BASE + slot * SLOT_BYTES
        time_us += 9
        return (
            Row("alloc", address, size, time_us, stack),
            Row("free_requested", address, size, time_us + 3, stack + 1),
            Row("free_completed", address, size, time_us + 3, stack + 1),
        )

    while True:
        backward = []
        for layer in range(shape.layers):
            alloc, *free = three(layer, sizes[layer], 2 * layer % (shape.stacks - 1))
            yield alloc
            backward.append(free)
        for layer in reversed(range(shape.layers)):
            temporary = three(shape.layers, sizes[layer] // 2, (2 * layer + 1) % (shape.stacks - 1))
            yield from temporary
            yield from backward[layer]
        for _ in range(shape.kept_per_step):
            kept += 1
            alloc, *_ = three(shape.layers + kept, 512, shape.stacks - 2)
            yield alloc


def segments_after(shape: Shape) -> list[dict[str, Any]]:
    """Segments of equal slots, each with one block, as they stand after the last event."""
    live: dict[int, Row] = {}
    highest = 0
    for number, row in enumerate(all_rows(shape)):
        if number == shape.events + shape.skipped:
            break
        highest = max(highest, row.address)
        if row.action == "alloc":
            live[row.address] = row
        elif row.action == "free_completed":
            live.pop(row.address, None)
    slots = (highest - BASE) // SLOT_BYTES + 1 if highest else 0
    segments = []
    for first in range(0, slots, SEGMENT_SLOTS):
        blocks = []
        for slot in range(first, first + SEGMENT_SLOTS):
            row = live.get(BASE + slot * SLOT_BYTES)
            blocks.append(
                {
                    "address": BASE + slot * SLOT_BYTES,
                    "size": SLOT_BYTES,
                    "requested_size": row.size if row else 512,
                    "state": "active_allocated" if row else "inactive",
                    "frames": row.stack if row else -1,
                }
            )
        held = [block for block in blocks if block["state"] == "active_allocated"]
        segments.append(
            {
                "device": 0,
                "address": BASE + first * SLOT_BYTES,
                "total_size": SEGMENT_SLOTS * SLOT_BYTES,
                "allocated_size": len(held) * SLOT_BYTES,
                "active_size": len(held) * SLOT_BYTES,
                "requested_size": sum(block["requested_size"] for block in held),
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": -1,
                "blocks": blocks,
            }
        )
    return segments


SETTINGS: dict[str, Any] = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {str(2**i): 0 for i in range(16)},
}


def snapshot(shape: Shape) -> dict[str, Any]:
    """The whole as Python objects, shared as PyTorch shares them."""
    frames, numbers = frames_of(shape)
    stacks = [[frames[i] for i in stack] for stack in numbers]
    segments = segments_after(shape)
    for part in [*segments, *(block for segment in segments for block in segment["blocks"])]:
        part["frames"] = stacks[part["frames"]] if part["frames"] >= 0 else []
    trace = []
    free: list[Any] = []
    for row in rows(shape):
        # A list of its own for each event, but one for both halves of a free.
        if row.action != "free_completed" or not free:
            free = list(stacks[row.stack])
        trace.append(
            {
                "action": row.action,
                "addr": row.address,
                "size": row.size,
                "stream": 0,
                "time_us": row.time_us,
                "frames": free,
            }
        )
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": SETTINGS,
        "external_annotations": [],
    }


class Writer:
    """Writes what the pickler of protocol 4 would, without holding the objects."""

    def __init__(self, file: BinaryIO) -> None:
        """Start a pickle."""
        self.file = file
        self.texts: dict[str, int] = {}
        self.noted = 0
        file.write(b"\x80\x04")

    def memoize(self) -> bytes:
        """Put the top aside under the next number."""
        self.noted += 1
        return b"\x94"

    def get(self, number: int) -> bytes:
        """What was put aside under a number."""
        if number < 256:
            return b"h" + number.to_bytes(1, "little")
        return b"j" + number.to_bytes(4, "little")

    def text(self, text: str) -> bytes:
        """A string; the second time a reference to the first."""
        if text in self.texts:
            return self.get(self.texts[text])
        self.texts[text] = self.noted
        raw = text.encode()
        assert len(raw) < 256
        return b"\x8c" + len(raw).to_bytes(1, "little") + raw + self.memoize()

    def integer(self, value: int) -> bytes:
        """A whole number in its shortest form."""
        if 0 <= value < 1 << 8:
            return b"K" + value.to_bytes(1, "little")
        if 0 <= value < 1 << 16:
            return b"M" + value.to_bytes(2, "little")
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + value.to_bytes(4, "little", signed=True)
        length = value.bit_length() // 8 + 1
        return (
            b"\x8a" + length.to_bytes(1, "little") + value.to_bytes(length, "little", signed=True)
        )

    def plain(self, value: Any) -> bytes:
        """Anything of the settings and segments; nothing shared but strings."""
        match value:
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                return self.integer(value)
            case float():
                return b"G" + struct.pack(">d", value)
            case str():
                written = self.text(value)
            case tuple():
                written = b"".join(map(self.plain, value)) + b"\x86" + self.memoize()
            case dict():
                start = b"}" + self.memoize() + b"("
                items = (self.text(key) + self.plain(item) for key, item in value.items())
                written = start + b"".join(items) + b"u"
            case _:
                start = b"]" + self.memoize()
                items = map(self.plain, value)
                written = start + (b"(" + b"".join(items) + b"e" if value else b"")
        return written


def write(shape: Shape, path: Path) -> None:
    """Write the pickle of `snapshot(shape)`, in little memory however many events it has."""
    frames, numbers = frames_of(shape)
    segments = segments_after(shape)
    for part in [*segments, *(block for segment in segments for block in segment["blocks"])]:
        part["frames"] = [frames[i] for i in numbers[part["frames"]]] if part["frames"] >= 0 else []
    with path.open("wb") as file:
        out = Writer(file)
        file.write(b"}" + out.memoize() + b"(" + out.text("segments") + out.plain(segments))
        file.write(out.text("device_traces") + b"]" + out.memoize() + b"]" + out.memoize())
        write_trace(out, shape, frames, numbers)
        file.write(b"a" + out.text("allocator_settings") + out.plain(SETTINGS))
        file.write(out.text("external_annotations") + b"]" + out.memoize() + b"u.")


def write_trace(
    out: Writer, shape: Shape, frames: list[dict[str, Any]], numbers: list[list[int]]
) -> None:
    """Write the events, 1,000 at a time as CPython does."""
    known: dict[int, int] = {}

    def frame(number: int) -> bytes:
        if number not in known:
            known[number] = out.noted
            return out.plain(frames[number])
        return out.get(known[number])

    free = -1
    for count, row in enumerate(rows(shape)):
        if count % 1000 == 0:
            out.file.write(b"e(" if count else b"(")
        event = [b"}" + out.memoize() + b"(" + out.text("action") + out.text(row.action)]
        event += [out.text("addr") + out.integer(row.address)]
        event += [out.text("size") + out.integer(row.size) + out.text("stream") + b"K\0"]
        event += [out.text("time_us") + out.integer(row.time_us) + out.text("frames")]
        if row.action == "free_completed" and free >= 0:
            event += [out.get(free), b"u"]
        else:
            free = out.noted
            event += [b"]" + out.memoize() + b"("]
            event += [frame(number) for number in numbers[row.stack]]
            event += [b"eu"]
        out.file.write(b"".join(event))
    out.file.write(b"e")


if __name__ == "__main__":
    write(Shape(events=int(sys.argv[1])), Path(sys.argv[2]))
