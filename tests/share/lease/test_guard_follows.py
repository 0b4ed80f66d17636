"""What is taken besides tensors, followed while a guarded lease is held: in own processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest
from brokers import START_SECONDS, Broker

MIB = 1 << 20

HEAD = """
import json, time, torch, memfit
from memfit.guard import overhead
from memfit.track import cpu

MIB = 1 << 20
assert cpu.start() is None

def room():
    low, high = 0, 4096
    while high - low > 1:
        middle = (low + high) // 2
        try:
            torch.empty(middle * MIB, dtype=torch.uint8)
            low = middle
        except RuntimeError:
            high = middle
    return low

def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
"""

GROWS_BESIDES = """
with memfit.lease(overhead.resident() + 128 * MIB, guard=True) as lease:
    before = room()
    besides_torch = b"x" * (64 * MIB)
    until(lambda: room() < before - 60)
    tight = room()
    held = torch.ones(tight * MIB, dtype=torch.uint8)
    full = overhead.resident()
    del held, besides_torch
    until(lambda: room() > before - 8)
    print(json.dumps({"before": before, "tight": tight, "full": full, "leased": lease.bytes}))
"""

NOT_TOUCHED_YET = """
held = torch.empty(256 * MIB, dtype=torch.uint8)
with memfit.lease(overhead.resident() + 320 * MIB, guard=True) as lease:
    left = room()
    held.fill_(1)
    more = torch.ones(left * MIB, dtype=torch.uint8)
    print(json.dumps({"left": left, "full": overhead.resident(), "leased": lease.bytes}))
"""

MORE_THAN_LEASED = """
with memfit.lease(overhead.resident() + 128 * MIB, guard=True) as lease:
    held = torch.ones(96 * MIB, dtype=torch.uint8)
    besides_torch = b"x" * (64 * MIB)
    until(lambda: room() == 0)
    over = lease.in_use["host"] > lease.bytes
    # What is freed brings it down to the lease, and no more than that may be taken again.
    del held
    until(lambda: 48 < room() < 80)
    del besides_torch
    until(lambda: room() > 100)
    print(json.dumps({"over": over}))
"""

Run = Callable[[str], dict[str, int]]


@pytest.fixture
def run(idle_broker: Broker, script: Callable[[str], subprocess.Popen[str]]) -> Run:
    """Run a program to its end; what it printed."""
    idle_broker.start(memory="host=64GiB")

    def end(source: str) -> dict[str, int]:
        process = script(HEAD + source)
        stdout, _ = process.communicate(timeout=4 * START_SECONDS)
        assert process.returncode == 0
        found: dict[str, int] = json.loads(stdout)
        return found

    return end


def test_what_comes_besides_tensors_later_is_taken_from_their_budget_and_given_back(
    run: Run,
) -> None:
    found = run(GROWS_BESIDES)
    assert 100 < found["before"] <= 140
    assert found["before"] - found["tight"] in range(61, 70)
    assert found["full"] <= found["leased"] + MIB


def test_tensors_that_nobody_has_touched_yet_do_not_hide_what_is_taken_besides(run: Run) -> None:
    found = run(NOT_TOUCHED_YET)
    assert 40 < found["left"] <= 76
    assert found["full"] <= found["leased"] + MIB


def test_where_more_is_taken_than_leased_nothing_is_granted_until_something_is_freed(
    run: Run,
) -> None:
    assert run(MORE_THAN_LEASED) == {"over": True}
