"""What memfit holds in the place of saved tensors is seen as held by the graph."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from handmade import record
from torch import Tensor, nn

from memfit import _native
from memfit.apply.remat.remat import Rematerialiser
from memfit.run.script.script_recorder import ScriptRecorder
from memfit.run.script.spill import SpillFile
from memfit.track import cpu
from memfit.track.look import NAMES, look


class Net(nn.Module):
    """Of five allocations as large as its input, two wait for backward."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(64))
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        sums = x.cumsum(0)  # what nothing saves: the sigmoid is computed again from it
        return ((sums + self.shift).sigmoid() * self.gain).cumsum(0).square().mean()


@pytest.fixture(autouse=True)
def counting() -> None:
    assert cpu.start() is None


def held_since(event: int) -> dict[int, tuple[str, str]]:
    """Bytes of blocks that are there since an event, with what and whose they are said to be."""
    gc.collect()  # so that what is old is not taken for results of this line
    found = look()
    live = _native.survivors(event, 2**63, with_models=False)
    return {
        address: (found.categories.get(address, ""), NAMES.owner(found.owners.get(address, 0)).name)
        for address, size, _ in live
        if size > 256
    }


def test_what_a_plan_keeps_and_computes_from_is_of_the_graph():
    model, x = Net(), torch.randn(128, 64)
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(lambda made: "cumsum" not in made.name))
    since = _native.last_event() + 1
    with remat.forward():
        loss = model(x)
    assert remat.outcome().observations.dropped_saves > 0
    held = list(held_since(since).values())
    assert len(held) == 2  # both sums; the sigmoid and what comes of it are gone
    for category, owner in held:
        assert category == "activation"
        assert owner.startswith("the autograd graph of `loss`")
    loss.backward()
    assert not held_since(since).keys() - {p.grad.data_ptr() for p in model.parameters()}


def test_what_a_recorded_step_keeps_in_memory_is_of_the_graph(tmp_path: Path):
    model, x = Net(), torch.randn(128, 64)
    spill = SpillFile(str(tmp_path))
    recorder = ScriptRecorder(model, spill)
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
        loss = model(x)
    of_graph = {one.tensor.data_ptr() for one in look().walk.reached if one.through_graph}
    assert model.gain.data_ptr() in of_graph  # what steps change goes to no file
    assert loss.requires_grad
    spill._room.file.close()
