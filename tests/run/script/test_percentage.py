"""A percentage as the budget: kept in the steps before it is known, too, and a share of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

from memfit.run.script.percentage import least_bytes

TWO_OPTIMIZERS = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            tower = lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
            self.user, self.item = tower(), tower()
        def forward(self, x):
            return (self.user(x) * self.item(x)).square().mean()

    model = Towers()
    optimizers = [torch.optim.Adam(it.parameters()) for it in (model.user, model.item)]
    for step in range(5):
        loss = model(torch.randn(256, 512))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(repr(loss.item()))
"""
"""6 MiB of weights and twice as much state, of two optimizers."""

WITH_A_TEACHER = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = lambda count: nn.Sequential(*[nn.Linear(512, 512) for _ in range(count)])
    teacher, student = layers(8).requires_grad_(False), layers(2)
    optimizer = torch.optim.Adam(student.parameters())
    for step in range(5):
        x = torch.randn(256, 512)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""
"""A teacher of 8 MiB that nothing trains, and a student of 2."""

SCRIPTS = [TWO_OPTIMIZERS, WITH_A_TEACHER]


@pytest.mark.parametrize("script", SCRIPTS, ids=["two optimizers", "a teacher"])
def test_a_percentage_is_kept_in_the_first_step(tmp_path: Path, script: str):
    ran = inline(tmp_path, "60%", script, offload="chosen")
    verdict = ran.fitting["verdict"]
    assert verdict["kept"], ran.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=["two optimizers", "a teacher"])
def test_a_percentage_is_one_of_all_that_the_step_takes(tmp_path: Path, script: str):
    """Of what waits in files meanwhile, too."""
    (tmp_path / "plain").mkdir()
    whole = inline(tmp_path / "plain", "1GiB", script).fitting["verdict"]["peak_bytes"]
    budget = inline(tmp_path, "60%", script, offload="chosen").fitting["verdict"]["budget_bytes"]
    assert 0.95 * whole < budget / 0.6 < 1.1 * whole


def test_what_a_percentage_comes_to_at_least():
    assert least_bytes("2KiB", 1000) == least_bytes(2048, 1000) == 2048
    assert least_bytes("55%", 1000) == 550
    assert least_bytes("100%", 1000) == least_bytes("55%", 0) == 0
