"""CUDA peaks that nest, on a stand-in for torch's statistics and on a real device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit
from memfit.track import cuda

MIB = 1 << 20


class Allocator:
    """Two devices with the statistics of torch's caching allocator: one peak each."""

    def __init__(self) -> None:
        self.current = [0, 0]
        self.peak = [0, 0]
        self.resets = 0

    def change(self, bytes_: int, device: int = 0) -> None:
        self.current[device] += bytes_
        self.peak[device] = max(self.peak[device], self.current[device])

    def spike(self, bytes_: int, device: int = 0) -> None:
        self.change(bytes_, device)
        self.change(-bytes_, device)

    def memory_stats(self, device: int) -> dict[str, int]:
        if not self.peak[device]:
            return {}
        measures = (("current", self.current), ("peak", self.peak))
        return {
            f"{kind}_bytes.all.{measure}": values[device] * (2 if kind == "reserved" else 1)
            for kind in cuda.KINDS
            for measure, values in measures
        }

    def reset_peak_memory_stats(self, device: int) -> None:
        self.resets += 1
        self.peak[device] = self.current[device]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    stand_ins: dict[str, Any] = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "memory_stats": found.memory_stats,
        "reset_peak_memory_stats": found.reset_peak_memory_stats,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def test_each_track_has_its_own_peak(allocator: Allocator):
    allocator.change(10)
    allocator.spike(1000)
    with memfit.track("outer") as outer:
        allocator.spike(50)
        with memfit.track("first") as first:
            allocator.spike(5)
            allocator.change(3)
        with memfit.track("second") as second:
            allocator.spike(20)
        with memfit.track("third") as third:
            pass
    peaks = [t["cuda:0"].peak_bytes for t in (outer, first, second, third)]
    assert peaks == [60, 15, 33, 13]
    assert (outer.before_bytes, outer.after_bytes) == (10, 13), (
        "the main device is the first CUDA one"
    )
    assert outer["cuda:0"].reserved_peak_bytes == 120
    assert outer["cuda:0"].active_peak_bytes == 60
    assert outer["cuda:0"].peak_by_category is None
    with pytest.raises(KeyError):
        outer["cuda:1"]


def test_an_outer_peak_after_an_inner_track_counts(allocator: Allocator):
    with memfit.track("outer") as outer:
        with memfit.track("inner") as inner:
            allocator.spike(5)
        allocator.spike(70)
        assert outer.peak_bytes == 70
    assert (outer.peak_bytes, inner.peak_bytes) == (70, 5)


def test_overlapping_windows_end_in_any_order(allocator: Allocator):
    first = cuda.Window()
    allocator.spike(7)
    second = cuda.Window()
    allocator.spike(30)
    assert first.close()[0].peak["allocated"] == 30
    allocator.spike(40)
    assert second.close()[0].peak["allocated"] == 40


def test_the_programs_peak_is_reset_only_where_it_hides_ours(allocator: Allocator):
    allocator.change(10)
    with memfit.track("first"):
        allocator.spike(5)
    assert allocator.resets == 0, "the peak was what was held"
    assert allocator.peak[0] == 15, "the program can still ask for its peak"
    with memfit.track("second"):
        pass
    assert allocator.resets == 1


def test_a_device_that_comes_into_use_inside(allocator: Allocator):
    with memfit.track("late") as t:
        allocator.change(100, device=1)
    assert (t["cuda:1"].before_bytes, t["cuda:1"].after_bytes) == (0, 100)
    assert "cuda:1" in str(t)
    assert "reserved" in str(t)


def test_without_cuda_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delattr(torch.cuda, "memory_stats")
    with memfit.track("no cuda") as t:
        pass
    assert [d.device for d in t.devices] == ["cpu"]


@pytest.mark.gpu
def test_nested_peaks_on_a_real_device():
    torch.cuda.init()
    model = torch.nn.Linear(512, 512, device="cuda")
    with memfit.track("outer") as outer:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with memfit.track("inner") as inner:
            torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        with memfit.track("later") as later:
            torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    peaks = [t["cuda:0"].peak_bytes - t["cuda:0"].before_bytes for t in (outer, inner, later)]
    assert peaks == [64 * MIB, 16 * MIB, 32 * MIB]
    expected = sum(p.nbytes for p in model.parameters())
    assert outer["cuda:0"].after_by_category["parameter"] >= expected
    assert outer["cuda:0"].reserved_peak_bytes >= 64 * MIB
