"""``memfit.track``: nesting, decorators, threads, exceptions, categories."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

import pytest
import torch
from torch import nn

import memfit
from memfit.track.track import Track

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """What other tests left in cycles would be freed in the middle of a span."""
    gc.collect()


def allocate(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def test_before_after_and_peak():
    held = allocate(1)
    with memfit.track("plain") as t:
        kept = allocate(2)
        passing = allocate(4)
        assert t.peak_bytes - t.before_bytes == 6 * MIB
        del passing
    assert t.after_bytes - t.before_bytes == 2 * MIB
    assert t.peak_bytes - t.before_bytes == 6 * MIB
    before = t.before_bytes
    del held, kept
    allocate(50)
    assert (t.before_bytes, t.after_bytes) == (before, before + 2 * MIB), "a record does not change"


def test_inner_peaks_are_their_own_and_leave_outer_ones_alone():
    with memfit.track("outer") as outer:
        allocate(8)
        with memfit.track("first") as first:
            allocate(2)
            with memfit.track("innermost") as innermost:
                allocate(1)
        with memfit.track("second") as second:
            allocate(4)
    peaks = [(t.peak_bytes - t.before_bytes) // MIB for t in (outer, first, innermost, second)]
    assert peaks == [8, 2, 1, 4]


def test_a_track_can_be_entered_again_and_inside_itself():
    same = memfit.track("same")
    with same as outer:
        allocate(3)
        with same as inner:
            allocate(1)
    with same as later:
        allocate(2)
    assert [(t.peak_bytes - t.before_bytes) // MIB for t in (outer, inner, later)] == [3, 1, 2]
    assert same.last is later


def test_decorators():
    @memfit.track
    def bare(mebibytes: int) -> int:
        """Bare."""
        allocate(mebibytes)
        return mebibytes

    @memfit.track("named")
    def named() -> None:
        allocate(2)

    assert bare(3) == 3
    named()
    assert bare.__doc__ == "Bare."
    assert bare.__name__ == "bare"
    assert bare.track.last.peak_bytes - bare.track.last.before_bytes == 3 * MIB
    assert bare.track.name.endswith("bare")
    assert named.track.last.name == "named"


def test_a_recursive_function_has_a_span_for_each_call():
    peaks: list[int] = []
    spans = Track("recursive")

    @spans
    def deep(level: int) -> None:
        held = allocate(1)
        if level:
            deep(level - 1)
            assert spans.last is not None
            peaks.append((spans.last.peak_bytes - spans.last.before_bytes) // MIB)
        del held

    deep(3)
    assert peaks == [1, 2, 3]


def test_coroutines_interleave():
    @memfit.track("coroutine")
    async def work(mebibytes: int) -> None:
        held = allocate(mebibytes)
        await asyncio.sleep(0.01)
        del held

    async def both() -> None:
        await asyncio.gather(work(1), work(2))

    asyncio.run(both())
    last = work.track.last
    assert last.peak_bytes - last.before_bytes >= 2 * MIB


def test_generators_are_refused():
    with pytest.raises(memfit.UsageError, match="is a generator"):

        @memfit.track
        def numbers():
            yield 1


def test_an_exception_passes_through_and_the_record_stays():
    def fail() -> None:
        allocate(2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), memfit.track("failing") as t:
        fail()
    assert t.exception == "ZeroDivisionError"
    assert t.peak_bytes - t.before_bytes == 2 * MIB
    assert "ended by ZeroDivisionError" in str(t)


def test_all_threads_count_and_tracks_of_threads_do_not_mix():
    spans: dict[int, object] = {}
    entered, done = threading.Barrier(3), threading.Barrier(3)
    shared = memfit.track("thread")

    def work(mebibytes: int) -> None:
        entered.wait()
        with shared as t:
            allocate(mebibytes)
            done.wait()
        spans[mebibytes] = t

    with memfit.track("main") as t:
        threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        entered.wait()
        done.wait()
        for thread in threads:
            thread.join()
    assert t.peak_bytes - t.before_bytes >= 2 * MIB
    assert len(spans) == 2


def test_without_entering_there_is_nothing():
    from memfit.track.track import Span

    with pytest.raises(memfit.UsageError, match="never entered"):
        _ = Span("idle").peak_bytes


def test_categories_of_a_training_step():
    width = 128
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    optimizer = torch.optim.Adam(model.parameters())
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    other = parameters + buffers

    def step() -> None:
        model(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with memfit.track("first step of Adam") as t:
        step()
    before, after = t["cpu"].before_by_category, t["cpu"].after_by_category
    assert before["parameter"] >= parameters
    assert before["module_buffer"] >= buffers
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    assert after["optimizer_state"] - before["optimizer_state"] == state
    assert after["gradient"] == before["gradient"]

    # The batch is tiny, so the peak is in the optimizer step, where all gradients are alive.
    with memfit.track("second step of Adam") as t:
        step()
    peak = t["cpu"].peak_by_category
    assert peak is not None
    assert peak["gradient"] - t["cpu"].before_by_category["gradient"] == parameters
    assert peak["parameter"] == t["cpu"].before_by_category["parameter"]
    assert sum(peak.values()) == t.peak_bytes
    assert other > 0


def test_without_categories_all_is_other_or_known_before():
    with memfit.track("plain bytes", categories=False) as t:
        model = nn.Linear(64, 64)
    found = t["cpu"]
    grown = found.after_by_category["other"] - found.before_by_category["other"]
    assert grown == sum(p.nbytes for p in model.parameters())


def test_the_record_as_json_and_as_a_table():
    with memfit.track("report") as t:
        allocate(3)
    found = t.as_dict()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(t.record.as_dict()))
    assert found["schema_version"] == 1
    device = found["devices"][0]
    assert device["device"] == "cpu"
    assert isinstance(device["peak_bytes"], int)
    lines = str(t).splitlines()
    assert lines[0].startswith("report  ")
    assert lines[1].split() == ["cpu", "before", "peak", "after"]
    assert "allocated" in [line.split()[0] for line in lines]
    with pytest.raises(KeyError):
        t["cuda:7"]


def test_fake_and_meta_tensors_do_no_harm():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = nn.Linear(1000, 1000)
    meta = nn.Linear(1000, 1000, device="meta")
    lazy = nn.LazyLinear(5)
    half_made = nn.Linear.__new__(nn.Linear)
    with memfit.track("odd modules") as t:
        pass
    assert t.after_bytes == t.before_bytes
    del fake, meta, lazy, half_made
