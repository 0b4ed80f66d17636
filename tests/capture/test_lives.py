"""Natural ranges and saved tensors together are the lives of the ordinary step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from small_examples import SMALL, small_example

from memfit.capture import record


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _unplanned_lives(trace: dict[str, Any]) -> list[list[tuple[int, int]]]:
    held: list[list[tuple[int, int]]] = [
        [(start, end) for start, end in allocation["natural"]]
        for allocation in trace["allocations"]
    ]
    for saved in trace["saved"]:
        allocation = trace["values"][saved["value"]]["allocation"]
        held[allocation].append((saved["pack"], saved["release"]))
    return [_merged(ranges) for ranges in held]


@functools.cache
def lean_recording(name: str) -> dict[str, Any]:
    """A recording, which is only read."""
    return record(small_example(name), probe=False)


@pytest.mark.parametrize("name", SMALL)
def test_union_of_natural_ranges_and_saves_is_the_ordinary_life(name: str) -> None:
    lean = lean_recording(name)
    ordinary = record(small_example(name), probe=False, lean=False)

    assert [op["name"] for op in lean["ops"]] == [op["name"] for op in ordinary["ops"]]
    kept = [_merged([(s, e) for s, e in a["natural"]]) for a in ordinary["allocations"]]
    assert _unplanned_lives(lean) == kept


@pytest.mark.parametrize("name", SMALL)
def test_lean_recording_shows_what_autograd_alone_keeps(name: str) -> None:
    trace = lean_recording(name)
    lives = _unplanned_lives(trace)
    shorter = sum(
        _merged([(s, e) for s, e in allocation["natural"]]) != life
        for allocation, life in zip(trace["allocations"], lives, strict=True)
    )
    assert shorter > 10
