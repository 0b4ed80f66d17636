"""Copies of optimizer state in files: those of `state_dict()`, and no tensor of the state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from memfit import _native
from memfit.apply.offload.state_view import AwayState, away_bytes, away_state, save_plainly
from memfit.apply.offload.tiers import open_tier
from memfit.run.script.saved_state import copies_in_files
from memfit.track import cpu


def is_counted(tensor: torch.Tensor) -> bool:
    return _native.is_counted(tensor.data_ptr())


def test_copies_of_what_is_elsewhere_are_in_files(tmp_path: Path):
    assert cpu.start() is None
    parameters = [nn.Parameter(torch.ones(1 << 16)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((1 << 16,), number + 1.0)
    optimizer.step()
    away, home = (away_state(optimizer, parameter) for parameter in parameters)
    assert isinstance(away, AwayState)
    assert isinstance(home, AwayState)
    away.send(open_tier("disk", 0, str(tmp_path)), 0)
    away.settle()
    save_plainly(optimizer)
    assert away_bytes(optimizer) == 4 << 16

    copies = copies_in_files(optimizer, str(tmp_path))
    before, window = _native.counted_bytes(), _native.AllocationWindow()
    saved = optimizer.state_dict()["state"]
    assert _native.counted_bytes() == before
    assert window.peak()[0] <= before + (4 << 16)
    assert [type(state) for state in saved.values()] == [dict, dict]
    buffers = [state["momentum_buffer"] for state in saved.values()]
    assert [is_counted(it) for it in buffers] == [False, True]
    assert buffers[1] is home["momentum_buffer"]
    for number, buffer in enumerate(buffers):
        assert torch.equal(buffer, torch.full((1 << 16,), number + 1.0))
    assert away_bytes(optimizer) == 4 << 16

    copies.remove()
    assert is_counted(optimizer.state_dict()["state"][0]["momentum_buffer"])
