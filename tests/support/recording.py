"""Snapshots made up as ``torch.cuda.memory._snapshot()`` returns them, with what is true of them.

A plain first-fit allocator stands in for PyTorch's: the page must show what is recorded, whoever
recorded it.
"""

from __future__ import annotations

import pickle
from bisect import insort
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

MIB = 1 << 20
SMALL_SEGMENT = 2 * MIB
SEGMENT = 20 * MIB


def frames(*calls: str) -> list[dict[str, Any]]:
    """Frames of ``file:line function``, innermost first, after those that all stacks start with."""
    native = [
        {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"},
        {"filename": "CUDACachingAllocator.cpp", "line": 0, "name": "malloc(unsigned long)"},
    ]
    own = []
    for call in calls:
        place, _, name = call.partition(" ")
        file, _, line = place.rpartition(":")
        own.append({"filename": file, "line": int(line), "name": name})
    return native + own


@dataclass
class Recording:
    """A device being recorded; totals after every event are kept beside, to compare with."""

    traces: list[dict[str, Any]] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)
    segments: dict[int, tuple[int, int]] = field(default_factory=dict)
    live: dict[int, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    time_us: int = 1_700_000_000_000_000
    is_recording: bool = True
    _total: int = 0
    _reserved: int = 0
    _distance: int = 0

    def _event(self, action: str, address: int, size: int, stack: Any, stream: int = 0) -> None:
        self.time_us += 7
        if self.is_recording:
            place = "device_free" if action == "oom" else "addr"
            self.traces.append(
                {
                    "action": action,
                    place: address,
                    "size": size,
                    "stream": stream,
                    "time_us": self.time_us,
                    "frames": stack,
                }
            )
            self.allocated.append(self._total)
            self.reserved.append(self._reserved)

    def start(self) -> None:
        """Start recording with what is there, as ``_record_memory_history`` does."""
        self.is_recording = True
        self.traces.clear()
        self.allocated = [self._total]
        self.reserved = [self._reserved]

    def alloc(self, size: int, stack: list[dict[str, Any]], stream: int = 0) -> int:
        """An allocation in the first gap that fits, else in a new segment."""
        size = -(-size // 512) * 512
        is_small = size <= MIB
        for number, (start, length) in enumerate(self.free):
            total, owner = self._segment_of(start)
            if length >= size and owner == stream and is_small == (total == SMALL_SEGMENT):
                del self.free[number]
                break
        else:
            length = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
            length = SMALL_SEGMENT if is_small else max(SEGMENT, length)
            start = 0x7F00_0000_0000 + self._distance
            self._distance += length + 64 * MIB
            self.segments[start] = (length, stream)
            self._reserved += length
            self._event("segment_alloc", start, length, stack, stream)
        # As PyTorch has it: a rest of at most 1 MiB stays with a large block.
        if length - size > (0 if is_small else MIB):
            insort(self.free, (start + size, length - size))
        else:
            size = length
        self.live[start] = (size, stack)
        self._total += size
        self._event("alloc", start, size, stack, stream)
        return start

    def release(self, address: int, *, waits: int = 0) -> None:
        """Let an allocation go; its block is free at once or ``waits`` is the event in between."""
        size, stack = self.live.pop(address)
        _, stream = self._segment_of(address)
        self._total -= size
        self._event("free_requested", address, size, stack, stream)
        for _ in range(waits):
            self._event("snapshot", 0, 0, [], 0)
        self._event("free_completed", address, size, stack, stream)
        insort(self.free, (address, size))
        self._join(address)

    def refuse(self, size: int, device_free: int, stack: list[dict[str, Any]]) -> None:
        """A request that fails."""
        self._event("oom", device_free, size, stack)

    def _segment_of(self, address: int) -> tuple[int, int]:
        """Bytes and stream of the segment that holds an address."""
        return next(
            (total, stream)
            for start, (total, stream) in self.segments.items()
            if start <= address < start + total
        )

    def _join(self, address: int) -> None:
        number = next(i for i, (start, _) in enumerate(self.free) if start == address)
        for left in (number, number - 1):
            if left >= 0 and left + 1 < len(self.free):
                (a, length), (b, more) = self.free[left], self.free[left + 1]
                if a + length == b and b not in self.segments:
                    self.free[left : left + 2] = [(a, length + more)]

    def _blocks(self, start: int, total: int) -> list[dict[str, Any]]:
        blocks = []
        inside = range(start, start + total)
        for address, (size, stack) in self.live.items():
            if address in inside:
                blocks.append((address, size, "active_allocated", stack))
        blocks += [
            (address, size, "inactive", []) for address, size in self.free if address in inside
        ]
        return [
            {"address": a, "size": s, "requested_size": s, "state": state, "frames": stack}
            for a, s, state, stack in sorted(blocks, key=lambda block: block[0])
        ]

    def device(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The segments at the end and the trace."""
        segments = []
        for start, (total, stream) in sorted(self.segments.items()):
            blocks = self._blocks(start, total)
            active = sum(b["size"] for b in blocks if b["state"] != "inactive")
            segments.append(
                {
                    "device": 0,
                    "address": start,
                    "total_size": total,
                    "allocated_size": active,
                    "active_size": active,
                    "requested_size": active,
                    "stream": stream,
                    "segment_type": "small" if total == SMALL_SEGMENT else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return segments, self.traces


def write(
    path: Path, *recordings: Recording, annotations: list[dict[str, Any]] | None = None
) -> Path:
    """Save devices as one snapshot."""
    devices = [recording.device() for recording in recordings]
    for number, (segments, _) in enumerate(devices):
        for segment in segments:
            segment["device"] = number
    snapshot = {
        "segments": [segment for segments, _ in devices for segment in segments],
        "device_traces": [trace for _, trace in devices],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": annotations or [],
    }
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return path


def training(steps: int = 3, layers: int = 12, seed: int = 1) -> Recording:
    """Steps of a small transformer whose parameters were there before."""
    random = Random(seed)
    recording = Recording(is_recording=False)
    module = "/home/ada/gpt/model.py"
    train = "/home/ada/gpt/train.py"
    torch = "/usr/lib/python3.12/site-packages/torch"
    init = frames(
        f"{torch}/nn/modules/linear.py:106 __init__", f"{module}:41 __init__", f"{train}:12 main"
    )
    parameters = [recording.alloc(random.choice((4, 6, 9)) * MIB, init) for _ in range(layers)]
    recording.start()
    forward = {
        name: frames(
            f"{torch}/nn/functional.py:{line} {name}",
            f"{module}:{line} forward",
            f"{torch}/nn/modules/module.py:1784 _call_impl",
            f"{train}:58 step",
        )
        for name, line in (("attention", 92), ("linear", 104), ("gelu", 110), ("dropout", 118))
    }
    backward = frames(f"{torch}/autograd/graph.py:829 _engine_run_backward", f"{train}:60 step")
    adam = frames(f"{torch}/optim/adamw.py:146 _init_group", f"{train}:61 step")
    gradients: list[int] = []
    for step in range(steps):
        kept = []
        for layer in range(layers):
            for name, size in (("attention", 11), ("linear", 8), ("gelu", 8), ("dropout", 3)):
                kept.append(recording.alloc(size * MIB + 512 * random.randrange(9), forward[name]))
                scratch = recording.alloc(
                    random.randrange(1, 5) * MIB, forward[name], stream=layer % 2 * 0x5500
                )
                recording.release(scratch, waits=layer % 2)
        made = []
        while kept:
            made += [recording.alloc(5 * MIB, backward)] if len(kept) % 4 == 0 else []
            recording.release(kept.pop())
        if step == 0:
            for _ in parameters:
                recording.alloc(6 * MIB, adam)
                recording.alloc(6 * MIB, adam)
        for gradient in gradients:
            recording.release(gradient)
        gradients = made
    recording.refuse(8 << 30, 1 << 30, forward["attention"])
    return recording
