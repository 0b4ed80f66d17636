"""What updates take, learnt on fakes, against real ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit import _native
from memfit.apply.optimizer_in_backward import OneByOne
from memfit.capture.probe.meta_tensors import MetaTensors
from memfit.run.script import update_needs as script_needs
from memfit.run.script.update_needs import update_needs
from memfit.track import cpu

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
}

_STEADY = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
ALL_OF_TORCH = {
    f"{name}{' at once' * at_once}": lambda p, name=name, at_once=at_once: getattr(
        torch.optim, name
    )(p, foreach=at_once)
    for name in (*_STEADY, "SGD")
    for at_once in (False, True)
} | {
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": OPTIMIZERS["momentum"],
    "adafactor": torch.optim.Adafactor,
}


def _taken(call: Any) -> tuple[int, int]:
    """Bytes that a call reaches above what was there, and that stay."""
    window = cpu.Window()
    before = _native.counted_bytes()
    call()
    after = _native.counted_bytes()
    reading = window.close()
    assert reading is not None
    return reading.peak_bytes - before, after - before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_fakes_takes_what_a_real_one_takes(name: str):
    assert cpu.start() is None
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    needs = update_needs(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    # Scalars are smaller than the allocator's grain.
    assert _taken(optimizer.step) == (
        pytest.approx(needs.first_bytes, abs=2048),
        pytest.approx(needs.all_state_bytes, abs=2048),
    )
    together, _ = _taken(optimizer.step)
    assert together == pytest.approx(needs.together_bytes, abs=2048)
    again = update_needs(optimizer)
    assert (again.first_bytes, again.alone) == (needs.together_bytes, needs.alone)
    assert update_needs(optimizer, needs) == again
    one_by_one = OneByOne(optimizer)
    for parameter in model.parameters():
        took, _ = _taken(lambda parameter=parameter: one_by_one.update(parameter))
        assert took == pytest.approx(needs.alone[id(parameter)][0], abs=2048)


def test_what_is_known_is_used_again_for_the_same_updates_alone(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model(torch.randn(4, 64)).sum().backward()
    needs = update_needs(optimizer)
    ran: list[Any] = []
    twins = script_needs._Twins
    monkeypatch.setattr(script_needs, "_Twins", lambda *of: ran.append(1) or twins(*of))
    assert update_needs(optimizer, needs).first_bytes == needs.first_bytes, "there is no state yet"
    assert len(ran) == 1
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-4
    assert update_needs(optimizer, needs).new_state_bytes == 0
    assert len(ran) == 1
    optimizer.param_groups[0]["betas"] = (0.85, 0.999)  # as schedules of one cycle do
    assert update_needs(optimizer, needs).new_state_bytes == 0
    assert len(ran) == 1
    for change in (
        lambda: setattr(model[0].weight, "grad", None),
        lambda: optimizer.param_groups[0].update(weight_decay=0.0),
    ):
        change()
        before = len(ran)
        expected = update_needs(optimizer)
        assert update_needs(optimizer, needs) == expected
        assert len(ran) == before + 2


@pytest.mark.parametrize("name", ALL_OF_TORCH)
def test_tensors_of_the_meta_device_tell_what_fakes_tell(name: str):
    """In a quarter of the time; where they cannot tell, they raise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512))  # the second goes in slices
    optimizer = ALL_OF_TORCH[name](model.parameters())
    has_told = False
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 256)).sum().backward()
        kind = script_needs._kind(optimizer)
        with contextlib.suppress(RuntimeError):
            told = script_needs._learnt(optimizer, kind, MetaTensors())
            expected = script_needs._learnt(optimizer, kind, FakeTensorMode())
            assert told.state_bytes == expected.state_bytes
            assert told.alone == expected.alone
            # Numbers are made below the mode.
            assert told.first_bytes == pytest.approx(expected.first_bytes, abs=256)
            assert told.together_bytes == expected.together_bytes
            has_told = True
        optimizer.step()
    assert has_told or "fused" in name


def test_what_an_optimizer_makes_of_nothing_takes_no_memory_either():
    class Averaged(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros(parameter.shape)
                state["mean"].lerp_(parameter.grad, 0.1)
                norm = state["mean"].norm().item()
                parameter.data.add_(state["mean"], alpha=-0.1 / norm if norm > 0 else 0.0)

    assert cpu.start() is None
    model = nn.Linear(1024, 1024)
    optimizer = Averaged(model.parameters(), 0.1)
    model(torch.randn(4, 1024)).sum().backward()
    found: list[Any] = []
    taken, _ = _taken(lambda: found.append(update_needs(optimizer)))
    assert taken < model.weight.nbytes / 8
    assert _taken(optimizer.step)[0] == pytest.approx(found[0].first_bytes, abs=8192)


def test_numbers_that_an_optimizer_draws_are_the_scripts():
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                scale = torch.rand(()) * torch.rand(1).item()
                parameter.data.add_(torch.randn_like(parameter) * scale)

    model = nn.Linear(64, 64)
    optimizer = Noisy(model.parameters(), 0.1)
    model(torch.randn(4, 64)).sum().backward()
    before = torch.get_rng_state()
    assert update_needs(optimizer).together_bytes >= model.weight.nbytes
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["adamw", "momentum", "nadam"])
def test_first_updates_one_by_one_take_what_is_foreseen(name: str):
    """In slices: an update makes the state of a slice beside that of the whole parameter."""
    assert cpu.start() is None
    model = nn.Linear(1024, 1024)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.randn(4, 1024)).sum().backward()
    needs = update_needs(optimizer)
    foreseen = needs.one_by_one_bytes(optimizer)
    assert not optimizer.state
    one_by_one = OneByOne(optimizer)
    first, kept = _taken(lambda: [one_by_one.update(p) for p in model.parameters()])
    assert kept == pytest.approx(needs.all_state_bytes, abs=4096)
    # The state of the bias comes after the peak, at the weight.
    assert first == pytest.approx(foreseen, abs=16384)
    again = update_needs(optimizer, needs)
    assert again == update_needs(optimizer)
    later, _ = _taken(lambda: OneByOne(optimizer).update(model.weight))
    assert later == pytest.approx(again.one_by_one_bytes(optimizer), abs=4096)
