"""Which recordings of a step in other ways are made, and that leaving out some changes no plan."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.capture.record.step import StepRunner
from memfit.plan import planner
from memfit.plan.alternatives import with_alternatives

CLASSES = 2000
BATCH = 8
CASTS = [{"autocast": {"dtype": "bfloat16", "cache": cache}} for cache in (False, True)]


class Words(nn.Module):
    """Predicts words; one layer is used twice, so that its weight is cast twice too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.head(self.inner(self.inner(x).relu()).relu())


def of(logits, batch):
    return functional.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())


def workload(loss=of, model=None):
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(BATCH, 16, 32),
        "words": torch.randint(0, CLASSES, (BATCH, 16)),
    }
    return memfit.Workload(
        model if model is not None else Words(),
        batch,
        lambda model, batch: loss(model(batch["x"]), batch),
        torch.optim.AdamW,
    )


def recorded(load, ways):
    found = with_alternatives(load, memfit.trace(load).native, ways)
    return json.loads(found.json())["alternatives"]


def knows_other_sizes(load, *sizes):
    """Of steps under autocast without and with its cache, asked for at such sizes."""
    pairs = zip(CASTS, sizes, strict=True)
    asked = [way if size is None else {**way, "sizes": size} for way, size in pairs]
    steps = recorded(load, asked)["steps"]
    assert [step["autocast"] for step in steps] == [way["autocast"] for way in CASTS]
    return [step["trace"]["couplings"] is not None for step in steps]


@pytest.mark.parametrize(
    ("sizes", "known"),
    [
        ((None, None), [True, True]),
        (("one", None), [False, True]),
        (({"last_of": 1}, {"last_of": 1}), [False, True]),
        (({"last_of": 1}, {"last_of": 2}), [True, True]),
        (({"last_of": 1}, "one"), [True, False]),
    ],
)
def test_a_way_is_recorded_at_another_batch_size_where_that_is_asked_for(sizes, known):
    assert knows_other_sizes(workload(), *sizes) == known


def test_where_the_last_way_fails_at_another_size_the_one_before_is_recorded_there():
    def loss(logits, batch):
        if (
            torch.is_autocast_cache_enabled()
            and len(logits) != BATCH
            and logits.dtype != torch.float
        ):
            raise ValueError("no")
        return of(logits, batch)

    sizes = {"last_of": 1}, {"last_of": 1}
    assert knows_other_sizes(workload(loss), *sizes) == [True, False]


def test_no_ways_are_none_found():
    assert recorded(workload(), []) == {"steps": [], "refusal": ""}


@pytest.fixture
def backwards(monkeypatch):
    """One entry for each recording that came as far."""
    found = []
    backward = StepRunner.backward

    def counted(self, loss):
        found.append(loss)
        backward(self, loss)

    monkeypatch.setattr(StepRunner, "backward", counted)
    return found


def other_ops(logits, batch):
    """A loss that runs one op more on fewer items."""
    return of(logits if len(logits) == BATCH else logits.neg(), batch)


def test_a_recording_at_another_size_ends_with_the_first_other_op(backwards):
    load = workload(other_ops)
    ways = recorded(load, CASTS[:1])
    assert [step["trace"]["couplings"] for step in ways["steps"]] == [None]
    assert len(backwards) == 3, "the plain step's two, and that of the way at its own size"


@pytest.mark.parametrize("runs_others", [False, True])
def test_a_piece_that_runs_other_ops_is_left_at_the_first_of_them(backwards, runs_others):
    load = workload(other_ops if runs_others else of)
    trace = memfit.trace(load).native
    backwards.clear()
    pieces = with_alternatives(load, trace, [{"items": 2}])
    assert len(backwards) == int(not runs_others)
    assert (pieces.encode() == trace.encode()) == runs_others


def test_what_does_not_run_in_slices_is_not_recorded_past_forward(backwards):
    load = workload(lambda logits, batch: of(logits, batch) + logits.mean())
    trace = memfit.trace(load)
    backwards.clear()
    ways = trace.native.ways()
    assert ways
    found = json.loads(with_alternatives(load, trace.native, ways).json())["alternatives"]
    assert "needs the logits of `head.weight` whole" in found["refusal"]
    assert found["steps"] == []
    assert backwards == []


class Normalised(nn.Module):
    """Of whose batch no item is apart from the others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.words(self.norm(x))


def both_sizes(*given):
    workload, trace, ways = given
    ways = [{key: value for key, value in way.items() if key != "sizes"} for way in ways]
    return with_alternatives(workload, trace, ways)


@pytest.mark.parametrize("kind", [Words, Normalised])
@pytest.mark.parametrize("allow", ["exact", "equivalent", "approximate"])
def test_plans_are_those_made_with_recordings_at_both_sizes(monkeypatch, kind, allow):
    load = workload(model=kind())
    trace = memfit.trace(load)
    options = memfit.Options(allow=allow)
    costs = {"kind": "roofline", "profile": planner.roofline("cpu", None, None)["profile"]}

    def plans():
        budgets = ("80%", "50%", "25%", "1KiB")
        made = (planner.plan_trace(trace, costs, it, options, load) for it in budgets)
        return [plan.json() for plan in made]

    spared = plans()
    monkeypatch.setattr(planner, "with_alternatives", both_sizes)
    assert spared == plans()
