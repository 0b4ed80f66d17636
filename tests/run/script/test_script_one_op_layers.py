"""Layers that compute by one op in evaluation, where nothing looks: under memfit they do so too."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

SCRIPT = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    is_frozen, items = "frozen" in sys.argv, 64 if "frozen" in sys.argv else 16

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(128, 4, 1024, dropout=0.0, batch_first=True)
            self.encoder = nn.Sequential(nn.Linear(32, 128), nn.TransformerEncoder(layer, 3))
            self.head = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 4))

        def forward(self, x):
            return self.head(self.encoder(x)).mean(1)

    model = Net()
    if is_frozen:
        model.encoder.eval().requires_grad_(False)
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for epoch in range(3):
        if not is_frozen:
            model.train()
        for _ in range(3):
            x, y = torch.randn(items, 32, 32), torch.randint(0, 4, (items,))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
        if not is_frozen:
            model.eval()
        with torch.no_grad():
            print("evaluation", repr(model(torch.randn(16, 32, 32)).double().sum().item()))
"""


@pytest.mark.parametrize("budget", ["75%", "60%"])
def test_an_evaluation_between_steps_is_to_the_bit(tmp_path: Path, budget: str):
    [loop] = inline(tmp_path, budget, SCRIPT, offload="chosen").loops
    assert loop["planned"]["steps"] >= 6


@pytest.mark.parametrize("budget", ["76%", "73%"])
def test_a_frozen_encoder_runs_in_planned_steps_as_in_recorded_ones(tmp_path: Path, budget: str):
    [loop] = inline(tmp_path, budget, SCRIPT, "frozen", offload="chosen").loops
    assert loop["planned"]["steps"] >= 6
    assert loop["plan"]["actions"]
    assert loop["divergence"] is None
