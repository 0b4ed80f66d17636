"""Gradients in files between steps: as they were wherever anybody looks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import inline
from torch import nn

from memfit import _native
from memfit.options import Options
from memfit.run.script.gradients_between import GradientsBetween
from memfit.run.script.request import FitRequest
from memfit.track import cpu

MIB = 1 << 20

SAVES = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.rand(2048, 512)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(data[:64] + step).square().mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
        copies = [copy.deepcopy(model.state_dict()) for _ in range(2)]
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        del copies
        print(repr(loss.item()), repr(total.item()))
    torch.save(model.state_dict(), "end.pt")
"""


def test_what_runs_between_steps_finds_room_and_gradients(tmp_path: Path):
    """6 MiB of weights, as much of gradients, and between steps two copies of the weights."""
    ran = inline(tmp_path, "20MiB", SAVES, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr


def trained() -> nn.Linear:
    model = nn.Linear(512, 512)
    model(torch.randn(4, 512)).sum().backward()
    return model


def between(tmp_path: Path) -> GradientsBetween:
    assert cpu.start() is None
    return GradientsBetween(FitRequest("2MiB", Options(offload=str(tmp_path))))


def is_mapped(model: nn.Linear) -> bool:
    assert model.weight.grad is not None
    return not _native.is_counted(model.weight.grad.data_ptr())


def test_gradients_come_back_when_a_pass_begins(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    gradients.step_ended(2 * MIB, [model])
    assert is_mapped(model)
    assert torch.equal(model.weight.grad, expected)
    model.weight.grad.mul_(2)
    gradients.pass_begins(2 * MIB, 2 * MIB)
    assert not is_mapped(model)
    assert torch.equal(model.weight.grad, 2 * expected)


def test_gradients_stay_once_it_is_known_that_there_is_room(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    gradients.step_ended(8 * MIB, [model])
    assert is_mapped(model)
    gradients.pass_begins(2 * MIB, 8 * MIB)
    gradients.step_ended(8 * MIB, [model])
    assert not is_mapped(model)


@pytest.mark.parametrize("seen", ["view", "array", "array of a mapped one"])
def test_what_others_see_of_a_gradient_is_the_gradient(tmp_path: Path, seen: str):
    gradients, model = between(tmp_path), trained()
    assert model.weight.grad is not None
    if seen == "view":
        look = model.weight.grad[0]
    elif seen == "array":
        look = model.weight.grad.numpy()[0]
    gradients.step_ended(2 * MIB, [model])
    assert is_mapped(model) == (seen == "array of a mapped one")
    if seen == "array of a mapped one":
        look = model.weight.grad.numpy()[0]
    gradients.pass_begins(2 * MIB, 2 * MIB)
    model.weight.grad.fill_(3)
    assert (look == 3).all()
