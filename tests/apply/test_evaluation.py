"""Measured peaks of steps under any treatments equal what the engine says of them.

To the byte where nothing is on its way beside the computation; never above it otherwise.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from treated import Treated

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.workload import Workload

WIDTH = 64


class Block(nn.Module):
    """Pre-norm block with dropout, an in-place op, and several tensors saved from one op."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = F.dropout(F.silu(self.up(self.norm(x))), 0.2)
        return x + self.down(h).tanh_()


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])

    def forward(self, x):
        return self.blocks(x)


def workload(blocks=4):
    torch.manual_seed(0)
    return Workload(
        Net(blocks),
        torch.randn(32, WIDTH),
        lambda model, batch: model(batch).pow(2).mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.fixture(scope="module")
def recorded():
    load = workload()
    trace = memfit.trace(load)
    return load, trace, Treated(trace).evaluate()


def measure(load, treated, folder):
    """Peak of a real step by the plan, and what it reported."""
    with Fitted(load, treated.plan(), offload_dir=folder) as fitted:
        fitted.step()
        measured = measure_peak(fitted.step, static_tensors(load, fitted.optimizer))
        report = fitted.report()
    assert not report.diverged
    assert report.kept_drops == ()
    assert measured.left_bytes == 0
    return measured.peak_bytes, report


def test_without_a_plan(recorded, tmp_path):
    load, trace, unplanned = recorded
    measured, _ = measure(load, Treated(trace), tmp_path)
    assert measured == unplanned["peak_bytes"]


def test_everything_stored(recorded, tmp_path):
    load, trace, unplanned = recorded
    treated = Treated(trace, stores=dict.fromkeys(unplanned["storable"]))
    evaluation = treated.evaluate()
    assert evaluation["is_valid"]
    measured, report = measure(load, treated, tmp_path)
    assert report.offloaded_tensors == len(unplanned["storable"]) > 20
    assert measured == evaluation["peak_bytes"] < unplanned["peak_bytes"]


@pytest.mark.parametrize("form", ["halves", "eighths"])
def test_everything_shrunk(recorded, tmp_path, form):
    load, trace, unplanned = recorded
    treated = Treated(trace, **{form: dict.fromkeys(unplanned["shrinkable"])})
    evaluation = treated.evaluate()
    assert evaluation["is_valid"]
    measured, report = measure(load, treated, tmp_path)
    assert report.shrunk_tensors == len(unplanned["shrinkable"]) > 20
    assert measured == evaluation["peak_bytes"] < unplanned["peak_bytes"]


def holds(recorded, folder, draw):
    """Draw treatments until some are valid, and measure a step by them."""
    load, _, _ = recorded
    for _ in range(80):
        treated = draw()
        evaluation = treated.evaluate()
        if evaluation["is_valid"]:
            break
    else:
        pytest.skip("no valid treatments found")
    measured, report = measure(load, treated, folder)
    assert report.replayed_ops == evaluation["replayed"]
    assert measured == evaluation["peak_bytes"]


@pytest.mark.parametrize("seed", range(16))
def test_any_drops_stores_shrinks_and_homes(recorded, tmp_path, seed):
    _, trace, unplanned = recorded
    chance = random.Random(f"{seed} shrunk")
    kinds = ("droppable", "storable", "shrinkable", "shrinkable")

    def draw():
        treated = Treated(trace, window_bytes=chance.choice([0, 20_000, 10**6]))
        ways = (treated.drops, treated.stores, treated.halves, treated.eighths)
        for allocation in sorted({*unplanned["droppable"], *unplanned["storable"]}):
            homes = allocation in unplanned["may_have_home"] and chance.random() < 0.5
            pairs = zip(ways, kinds, strict=True)
            allowed = [way for way, kind in pairs if allocation in unplanned[kind]]
            kept = {}
            chosen = chance.choice([*allowed, kept])
            chosen[allocation] = chance.randrange(1, 120) if homes else None
        return treated

    holds(recorded, tmp_path, draw)


@pytest.mark.parametrize("window_bytes", [0, 20_000, 50_000, 10**6])
@pytest.mark.parametrize("seed", range(8))
def test_any_drops_stores_and_homes(recorded, tmp_path, seed, window_bytes):
    _, trace, unplanned = recorded
    chance = random.Random(f"{seed} {window_bytes}")

    def draw():
        treated = Treated(trace, window_bytes=window_bytes)
        stored, dropped = chance.choice([(0.5, 0.3), (0.3, 0.6), (0.0, 0.7), (1.0, 0.0)])
        for allocation in sorted({*unplanned["droppable"], *unplanned["storable"]}):
            homes = allocation in unplanned["may_have_home"] and chance.random() < 0.5
            home = chance.randrange(1, 120) if homes else None
            if allocation in unplanned["storable"] and chance.random() < stored:
                treated.stores[allocation] = home
            elif allocation in unplanned["droppable"] and chance.random() < dropped:
                treated.drops[allocation] = home
        return treated

    holds(recorded, tmp_path, draw)
