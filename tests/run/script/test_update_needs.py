"""What updates take, learnt on fakes, against real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memfit import _native
from memfit.apply.optimizer_in_backward import OneByOne
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
    for change in (
        lambda: setattr(model[0].weight, "grad", None),
        lambda: optimizer.param_groups[0].update(weight_decay=0.0),
    ):
        change()
        before = len(ran)
        expected = update_needs(optimizer)
        assert update_needs(optimizer, needs) == expected
        assert len(ran) == before + 2


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
