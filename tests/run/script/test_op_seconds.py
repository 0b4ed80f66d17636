"""What ops take: one slow measurement among ops alike tells nothing."""

from __future__ import annotations

import time

import torch
from torch import nn

from memfit.run.script.observed import StepRecording
from memfit.run.script.op_seconds import usual_seconds


def recorded(model, batch):
    recording = StepRecording(model, ((batch,), {}), [], "cpu")
    loss = model(batch).sum()
    recording.backward_begins()
    loss.backward()
    recording.backward_ended()
    return recording.finish([], 1).recorder


def test_ops_alike_take_what_the_middle_one_took():
    """Alike are ops of one name and the same arguments on tensors of the same looks."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(slope)) for slope in (0.1, 0.1, 0.1, 0.3)]
    recorder = recorded(
        nn.Sequential(*blocks, nn.Linear(8, 4), nn.LeakyReLU(0.1)), torch.randn(2, 8)
    )
    recorder.seconds = [1e-3] * len(recorder.ops)
    names = [(index, op.operator.name) for index, op in enumerate(recorder.ops)]
    relus = [index for index, name in names if name == "aten.leaky_relu.default"]
    assert len(relus) == 5
    for index, seconds in zip(relus, (9.0, 2e-3, 3e-3, 5.0, 7.0), strict=True):
        recorder.seconds[index] = seconds
    usual = usual_seconds(recorder)
    assert [usual[index] for index in relus] == [3e-3, 3e-3, 3e-3, 5.0, 7.0]
    others = [seconds for index, seconds in enumerate(usual) if index not in relus]
    assert set(others) == {1e-3}


def test_ops_take_time_also_where_the_clock_of_cpu_time_stands(monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    recorder = recorded(nn.Linear(8, 4), torch.randn(2, 8))
    assert recorder.seconds
    assert all(seconds > 0 for seconds in recorder.seconds)
