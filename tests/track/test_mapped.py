"""Pages of mapped files count from the step on that writes them until they are gone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memfit import _native
from memfit.track import cpu
from memfit.track.mapped import MAPPED_FILES

WIDTH = 256
OF_WEIGHT = WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    assert cpu.start() is None
    yield
    gc.collect()
    MAPPED_FILES.forget_gone()


def mapped(folder: Path) -> nn.Linear:
    """A layer whose weight lies in a mapped file."""
    torch.save({"weight": torch.ones(WIDTH, WIDTH)}, folder / "weights.pt")
    with torch.device("meta"):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)
    return model


def counted_by(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that are counted more when an optimizer is about to step."""
    before = _native.counted_bytes()
    MAPPED_FILES.step_begins(optimizer)
    return _native.counted_bytes() - before


def test_what_a_step_writes_counts_once_and_until_it_is_gone(tmp_path: Path):
    model = mapped(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert counted_by(optimizer) == 0, "it gets no gradient, so it is not written"
    model.weight.grad = torch.ones(WIDTH, WIDTH)
    window = cpu.Window()
    assert counted_by(optimizer) == OF_WEIGHT
    reading = window.close()
    assert reading is not None
    assert reading.peak_by_category["parameter"] >= OF_WEIGHT
    assert counted_by(optimizer) == 0
    optimizer.zero_grad()
    before = _native.counted_bytes()
    del model, optimizer
    gc.collect()
    MAPPED_FILES.forget_gone()
    assert before - _native.counted_bytes() == OF_WEIGHT


def test_state_that_was_read_from_a_file_counts_as_state(tmp_path: Path):
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    weight.grad = torch.ones(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", mmap=True))
    window = cpu.Window()
    assert counted_by(optimizer) == OF_WEIGHT
    reading = window.close()
    assert reading is not None
    assert reading.peak_by_category["optimizer_state"] >= OF_WEIGHT


def test_what_is_shared_or_numpys_does_not(tmp_path: Path):
    shared = nn.Parameter(torch.ones(WIDTH, WIDTH).share_memory_())
    lent = nn.Parameter(torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32)))
    name = str(tmp_path / "shared.bin")
    of_file = nn.Parameter(torch.from_file(name, shared=True, size=WIDTH * WIDTH).view(WIDTH, -1))
    for parameter in (shared, lent, of_file):
        parameter.grad = torch.ones(WIDTH, WIDTH)
    before = _native.counted_bytes()
    MAPPED_FILES.step_begins(torch.optim.SGD([shared, lent, of_file], 0.1))
    assert _native.counted_bytes() - before < OF_WEIGHT
