"""An optimizer's state steps aside with its model, and training goes on as if nothing had been."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.errors import ParkError
from memfit.share.park import parked as parking

MIB = 1 << 20

OPTIMIZERS = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=True),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
]


@pytest.fixture
def park(tmp_path, monkeypatch):
    """Parks to a folder that may lie in memory here, as `memfit.park` does."""
    made = parking.ParkedModel.__init__

    def init(self, *args, **options):
        made(self, *args, **{**options, "allow_memory": True})

    monkeypatch.setattr(parking.ParkedModel, "__init__", init)
    return lambda model, optimizer: parking.park(model, tmp_path, optimizer=optimizer)


def trained(make, pause):
    """Bits of a model and of its optimizer's state after six steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4, bias=False))
    optimizer = make(model.parameters())
    for _ in range(6):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pause(model, optimizer)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *kept]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(park, make):
    def pause(model, optimizer):
        parked = park(model, optimizer)
        assert parked.is_parked
        parked.wake()

    expected = trained(make, lambda _model, _optimizer: None)
    got = trained(make, pause)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def test_the_states_memory_is_given_back_too(park):
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB, and twice that of state
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parked = park(model, optimizer)
    assert (parked.resident_bytes, parked.nbytes // MIB) == (0, 12)
    moment = optimizer.state[model.weight]["exp_avg"]
    with pytest.raises(ParkError, match="`exp_avg of weight` was used while") as caught:
        print(moment)
    assert caught.value.tensor == "exp_avg of weight"
    parked.wake()
    assert moment is optimizer.state[model.weight]["exp_avg"]
    assert float(moment[0, 0]) == pytest.approx(0.1)


def test_state_that_came_to_be_after_the_first_parking_is_parked_as_well(park):
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = park(model, optimizer)
    assert before.nbytes == 256 * 256 * 4
    assert park(model, optimizer) is before
    before.wake()
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    after = park(model, optimizer)
    assert after.nbytes == 2 * before.nbytes
    after.wake()
    assert park(model, optimizer) is after
    after.wake()
    with pytest.raises(ParkError, match="it was closed"):
        before.park()


def test_state_is_parked_too_where_its_model_was_parked_without_it(park):
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
    alone = park(model, None)
    both = park(model, optimizer)
    assert (both.is_parked, both.nbytes) == (True, 2 * alone.nbytes)
    both.wake()
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)


def test_state_that_somebody_looks_at_is_refused_by_name(park):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    view = optimizer.state[model.bias]["exp_avg_sq"].view(2, 4)
    with pytest.raises(ParkError, match="cannot park `exp_avg_sq of bias`") as caught:
        park(model, optimizer)
    assert caught.value.reason == "aliased"
    assert torch.isfinite(view).all()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's accounts")
def test_what_was_moved_into_the_arena_is_not_kept_by_the_allocator_as_well(tmp_path):
    script = """
import sys, torch
from pathlib import Path
from torch import nn
from memfit.share.park.parked import ParkedModel

def of(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def made():
    return nn.Sequential(*(nn.Linear(512, 1024, bias=False) for _ in range(32)))

ParkedModel(made(), sys.argv[1], allow_memory=True).close()
torch.ones(4 << 20)  # freed, so glibc serves what is smaller from its heap and keeps it there
model = made()
before = of("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the highest is the present one from now on
parked = ParkedModel(model, sys.argv[1], allow_memory=True)
print(of("VmHWM") - before, parked.nbytes)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    extra, size = map(int, done.stdout.split())
    assert size == 64 * MIB
    assert extra < 24 * MIB
