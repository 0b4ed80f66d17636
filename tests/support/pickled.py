"""The independent twin of the reader: Python's own `pickle.load`, in the form of its columns."""

from __future__ import annotations

import json
import pickle
from typing import Any

from memfit._native import Snapshot

STATES = {
    "active_allocated": "allocated",
    "active_awaiting_free": "awaiting_free",
    "active_pending_free": "awaiting_free",
    "inactive": "inactive",
}


def plain_frames(frames: Any) -> tuple[tuple[str, str, int], ...]:
    return tuple((f["filename"], f["name"], f["line"]) for f in frames or [])


def label(event: dict[str, Any]) -> str:
    found = [event.get(key) for key in ("category", "user_metadata", "compile_context")]
    return next((text for text in found if text and text != "N/A"), "")


def by_pickle(data: bytes) -> dict[str, Any]:
    """What `pickle.loads` finds, device by device."""
    snapshot = pickle.loads(data)  # noqa: S301 - files of this project's own data
    devices: dict[int, dict[str, Any]] = {}
    for index, trace in enumerate(snapshot.get("device_traces", [])):
        if trace:
            devices[index] = {"segments": [], "events": [plain_event(event) for event in trace]}
    for segment in snapshot.get("segments", []):
        empty: dict[str, Any] = {"segments": [], "events": []}
        devices.setdefault(segment["device"], empty)["segments"].append(plain_segment(segment))
    for device in devices.values():
        device["segments"].sort(key=lambda segment: segment["address"])
    return devices


def plain_event(event: dict[str, Any]) -> tuple[Any, ...]:
    action = event["action"]
    address = event.get("device_free" if action == "oom" else "addr", 0)
    return (
        {"oom": "out_of_memory"}.get(action, action),
        address,
        event["size"],
        event["stream"],
        event.get("time_us", 0),
        plain_frames(event.get("frames")),
        tuple(event.get("pool_id", (0, 0))),
        label(event),
    )


def plain_segment(segment: dict[str, Any]) -> dict[str, Any]:
    address = segment["address"]
    blocks = []
    for block in segment["blocks"]:
        past = (block.get("history") or [{}])[0]
        start = block.get("address", address)
        address = start + block["size"]
        blocks.append(
            (
                start,
                block["size"],
                block.get("requested_size", past.get("real_size", block["size"])),
                STATES[block["state"]],
                plain_frames(block.get("frames", past.get("frames"))),
            )
        )
    return {
        "address": segment["address"],
        "total_size": segment["total_size"],
        "stream": segment["stream"],
        "is_small": segment["segment_type"] == "small",
        "is_expandable": segment.get("is_expandable", False),
        "pool": tuple(segment.get("segment_pool_id", (0, 0))),
        "stack": plain_frames(segment.get("frames")),
        "blocks": blocks,
    }


def document(data: bytes) -> dict[str, Any]:
    """The reader's columns."""
    columns: dict[str, Any] = json.loads(Snapshot.decode(data).json())
    return columns


def by_reader(data: bytes) -> dict[int, dict[str, Any]]:
    """The reader's columns in the form of `by_pickle`."""
    columns = document(data)
    texts = columns["texts"]
    starts = [0, *columns["stacks"]["ends"]]
    frames = [
        (texts[f["file"]], texts[f["function"]], f["line"]) for f in columns["stacks"]["frames"]
    ]
    stacks = [tuple(frames[a:b]) for a, b in zip(starts, columns["stacks"]["ends"], strict=False)]
    pools = [tuple(pool) for pool in columns["pools"]]
    devices = {}
    for device in columns["devices"]:
        of = device["events"]
        events = list(
            zip(
                of["actions"],
                of["addresses"],
                of["sizes"],
                [of["streams"][number] for number in of["stream_numbers"]],
                of["times_us"],
                [stacks[stack] for stack in of["stacks"]],
                [pools[pool] for pool in of["pools"]],
                [texts[label] for label in of["labels"]],
                strict=True,
            )
        )
        segments = [
            {
                **segment,
                "pool": pools[segment["pool"]],
                "stack": stacks[segment["stack"]],
                "blocks": [
                    (
                        *(b[k] for k in ("address", "size", "requested_size", "state")),
                        stacks[b["stack"]],
                    )
                    for b in segment["blocks"]
                ],
            }
            for segment in device["segments"]
        ]
        devices[device["index"]] = {"segments": segments, "events": events}
    return devices
