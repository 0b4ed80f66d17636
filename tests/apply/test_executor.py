"""The executor: what it asks of the parts of a plan, in which order, and what it refuses."""

from __future__ import annotations

import contextlib
import weakref
from typing import get_args

import pytest
import torch
from torch import nn

import memfit
from memfit import _native
from memfit.apply import executor
from memfit.apply.executor import Executor, Subject, Technique, without
from memfit.apply.part import Part
from memfit.options import Kind
from memfit.track import cpu

NOOP = {"kind": "noop", "promise": "exact", "count": 1, "bytes": 0}
"""As the engine's test-only technique writes it into a plan."""


class Noop(Part):
    """Writes down what it is asked, and does nothing."""

    def __init__(self):
        self.asked = []

    def place(self):
        self.asked.append("place")

    def forward(self):
        return self._around("forward")

    def running(self):
        return self._around("running")

    def update_of(self, parameter):
        return self._around(f"update of {tuple(parameter.shape)}")

    @contextlib.contextmanager
    def _around(self, what):
        self.asked.append(what)
        yield
        self.asked.append(f"end of {what}")


@pytest.fixture
def noop(monkeypatch):
    part = Noop()
    technique = Technique(lambda _subject, _actions: part, needs_whole_step=True)
    monkeypatch.setitem(executor.TECHNIQUES, "noop", technique)
    return part


def workload(**changes):
    model = nn.Linear(3, 2)
    given = {
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    return memfit.Workload(model, torch.ones(4, 3), **{**given, **changes})


def test_a_new_technique_is_asked_around_a_step(noop):
    fitted = memfit.Fitted(workload(), {"actions": [NOOP]})
    fitted.step()
    assert noop.asked == ["place", "running", "forward", "end of forward", "end of running"]


def test_a_new_technique_is_asked_around_each_update_that_runs_in_backward(noop):
    fuse = {"kind": "fuse_optimizer", "promise": "exact", "count": 2, "bytes": 0}
    fitted = memfit.Fitted(workload(), {"actions": [NOOP, fuse]})
    fitted.step()
    for shape in ((2, 3), (2,)):
        at = noop.asked.index(f"update of {shape}")
        assert noop.asked[at + 1] == f"end of update of {shape}"
        assert "end of forward" in noop.asked[:at]


def test_a_technique_outside_forward_needs_a_step_of_memfits_own(noop):
    fitted = memfit.Fitted(workload(), {"actions": [NOOP]})
    with pytest.raises(memfit.UsageError, match=r"`noop`, which needs `Fitted\.step`"):
        fitted.forward().__enter__()
    assert noop.asked == []


def test_a_technique_for_training_is_refused_where_nothing_is_trained(noop):
    inference = workload(loss=None, optimizer=None)
    with pytest.raises(memfit.UsageError, match="`noop`, and the workload has no loss"):
        memfit.Fitted(inference, {"actions": [NOOP]})
    assert noop.asked == []


def test_what_two_plans_offload_alike_stays_where_it_is(tmp_path):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    said = {
        "tier": "disk",
        "folder": str(tmp_path),
        "window_bytes": 1 << 20,
        "least_bytes": 64,
        "order": ["weight", "bias"],
    }
    plan = {"actions": [{"kind": "offload_optimizer", "offload_optimizer": said}]}
    subject = Subject(weakref.ref(model), optimizer)
    first = Executor(plan, subject)
    assert first.state is not None
    assert Executor(plan, subject, after=first).state is first.state
    wider = {**said, "window_bytes": 2 << 20}
    other = {"actions": [{"kind": "offload_optimizer", "offload_optimizer": wider}]}
    assert Executor(other, subject, after=first).state is not first.state
    elsewhere = Subject(weakref.ref(model), torch.optim.Adam(model.parameters()))
    assert Executor(plan, elsewhere, after=first).state is not first.state
    assert Executor(without(plan, ("offload_optimizer",)), subject, after=first).state is None


def test_what_goes_has_gone_before_the_rest_comes(tmp_path):
    """Plans that offload the state and the parameters, in turn: there is room for one of them."""
    assert cpu.start() is None
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = [name for name, it in model.named_parameters() if it.ndim > 1]
    size = 256 * 256 * 4
    of_state = {"window_bytes": 0, "least_bytes": size, "order": weights}
    of_parameters = {"room_bytes": size, "ahead_bytes": 0, "names": weights, "order": [0, 1, 2, 3]}
    kinds = {"offload_optimizer": of_state, "offload_parameters": of_parameters}
    plans = [
        {"actions": [{"kind": kind, kind: {"tier": "disk", "folder": str(tmp_path), **said}}]}
        for kind, said in kinds.items()
    ]
    subject, held = Subject(weakref.ref(model), optimizer), None
    for number, plan in enumerate(plans * 3):
        held = Executor(plan, subject, after=held)
        window = cpu.Window()
        before = _native.counted_bytes()
        held.place()
        reading = window.close()
        assert reading is not None
        if number:  # at first all is in memory
            most = max(before, _native.counted_bytes()) + 2 * size
            assert reading.peak_bytes <= most, f"{number}: {reading.peak_bytes} of {most}"


def test_every_kind_that_may_be_forbidden_can_be_carried_out():
    assert set(get_args(Kind)) == executor.TECHNIQUES.keys()
