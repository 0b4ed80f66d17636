"""Steps that are not as recorded: other ops, more calls of the model, another mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

NET = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        def forward(self, x, way=torch.tanh):
            for layer in self.layers:
                x = way(layer(x)) + 0.1
            return x

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def end(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
"""

ASTRAY = {
    # Saved after the step has left its plan: 4 MiB in memory.
    "other ops": """
    for step in range(6):
        way = (torch.tanh, torch.sigmoid)[step % 2]
        end(model(torch.randn(1024, 64), way).square().mean())
""",
    # One that the plan stores is larger first, and what follows has other ops.
    "larger, then other ops": """
    def mask(count):
        return torch.arange(1024) < count

    for step in range(6):
        out = model(torch.randn(1024, 64))[mask(512 + step % 2)]
        for way in [(torch.sin, torch.cos), (torch.tanh, torch.sigmoid)][step % 2] * 24:
            out = way(out) * 1.01
        end(out.square().mean())
""",
    # As often as it may be, the loop is planned again; then each call saves 1 MiB.
    "more calls": """
    for more in range(4):
        end(model(torch.randn(*[1] * more, 160 + 32 * more, 64)).square().mean())
    end(sum(model(torch.randn(1, 1, 1, 256, 64)).square().mean() for _ in range(14)))
""",
    # The first plan is for what is computed before training, and fits nothing.
    "other mode": """
    first = [model(torch.randn(4096, 64)) for _ in range(2)]
    first = sum(first).square().mean()
    model.eval()
    for step in range(5):
        loss = model(torch.randn(4096, 64))
        loss = loss * loss.sin().cos().exp().mean()
        end(loss.square().mean())
""",
}


BUDGETS = {
    "other ops": "2.5MiB",
    "larger, then other ops": "3MiB",
    "more calls": "10MiB",
    "other mode": "11MiB",
}


@pytest.mark.parametrize("way", ASTRAY)
def test_a_step_that_is_not_as_recorded_keeps_the_budget(tmp_path: Path, way: str):
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, BUDGETS[way], NET + ASTRAY[way], offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert all(loop["unplanned"]["steps"] == 0 for loop in ran.loops)


ROUTED = """
    for step in range(12):
        out = model(torch.randn(1024, 64))
        for part in range(1 + step % 3):
            out = out[torch.arange(len(out)) < len(out) - step * 8].sin().cos()
        end(out.square().mean())
"""


def test_steps_that_depend_on_values_are_recorded_again_twice_at_most(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "3MiB", NET + ROUTED, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert loop["observed"]["steps"] <= 4
    assert ran.fitting["verdict"]["kept"], ran.stderr
