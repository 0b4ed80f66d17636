"""Plans that set up the caching allocator: what is predicted, and what is set."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import memfit
from memfit.apply.allocator_settings import keep_in_one_piece
from memfit.errors import UsageError
from memfit.run.fitted import Fitted
from memfit.workload import Workload

SETTINGS = "expandable_segments:True"
PLAN = {"actions": [{"kind": "allocator_settings", "count": 1, "settings": SETTINGS}]}


def workload():
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.GELU()] * 4
    return Workload(
        nn.Sequential(*layers),
        torch.randn(4096, 512),
        lambda model, batch: model(batch).square().mean(),
        torch.optim.AdamW,
    )


@pytest.fixture
def set_settings(monkeypatch):
    """What reaches PyTorch; the allocator of this process stays as it is."""
    seen = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    return seen


def test_the_settings_reach_pytorch(set_settings):
    load = workload()
    Fitted(load, PLAN).step()
    assert set_settings == [SETTINGS]


def test_inference_may_set_them_too(set_settings):
    load = Workload(nn.Linear(6, 2), torch.randn(3, 6))
    Fitted(load, PLAN).step()
    assert set_settings == [SETTINGS]


def test_settings_that_pytorch_refuses_are_named():
    plan = {"actions": [{"kind": "allocator_settings", "settings": "nonsense:1"}]}
    with pytest.raises(UsageError, match="`nonsense:1`"):
        Fitted(workload(), plan)


def test_pytorch_knows_the_settings():
    # In a process of its own: they cannot be taken back.
    script = f"import torch; torch._C._accelerator_setAllocatorSettings({SETTINGS!r})"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_cpu_has_no_allocator_that_reserves():
    assert memfit.predict(workload()).reserved is None


def test_on_cuda_reserved_is_predicted_and_planned_for():
    trace = memfit.trace(workload(), device="cuda")
    prediction = memfit.predict(trace)
    reserved, peak = prediction.reserved, prediction.predicted_peak_bytes
    assert reserved.peak_reserved_bytes >= reserved.peak_allocated_bytes >= peak
    assert reserved.peak_reserved_bytes < 1.5 * peak
    assert reserved.fragmentation_bytes <= reserved.peak_reserved_bytes
    plan = memfit.plan(trace, budget="120%")
    assert plan.fits
    assert plan.reserved.peak_allocated_bytes <= plan.budget_bytes


def test_a_script_gets_segments_that_grow_unless_it_has_chosen(set_settings, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64")
        keep_in_one_piece()
        assert set_settings == []
        monkeypatch.delenv(name)
    keep_in_one_piece()
    assert set_settings == [SETTINGS]
    monkeypatch.setattr(torch.version, "cuda", None)
    keep_in_one_piece()
    assert set_settings == [SETTINGS]
