"""A script whose activations are held in fewer bits, with leave."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ran import in_forks

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(512, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def test_losses_are_near_the_budget_is_kept_and_it_is_said(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    leave = ["--allow", "shrink", "--forbid", "remat", "--no-offload"]
    fitted = ["-m", "memfit", "run", "--budget", "80%", *leave, str(script)]
    alone, ran = in_forks([([str(script)], tmp_path / "alone"), (fitted, tmp_path / "fit")])
    assert (alone.code, ran.code) == (0, 0), ran.stderr
    expected, got = ([float(line) for line in it.stdout.splitlines()] for it in (alone, ran))
    # The first is observed, and the second's loss is of weights that are the same still.
    assert got[:2] == expected[:2]
    assert got != expected
    assert all(abs(a - b) < 1e-3 * a for a, b in zip(expected, got, strict=True))
    assert "gradients are approximate, as was allowed" in ran.stderr
    assert "held in fewer bits until backward" in ran.stderr
    assert "kept: " in ran.stderr
