"""A model that the script lets go of is gone, with its optimizer, as without memfit."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

TURNS = """
    import torch, weakref
    from torch import nn

    torch.manual_seed(0)
    def train(kind):
        model = nn.Sequential(*[it for _ in range(5) for it in (nn.Linear(512, 512), nn.ReLU())])
        optimizer = kind(model.parameters())
        for step in range(6):
            x = torch.randn(256, 512)
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
        with torch.no_grad():
            print(repr(model(x).sum().item()))
        return weakref.ref(model), weakref.ref(optimizer)
    for kind in (torch.optim.Adagrad, torch.optim.AdamW):
        print([it() is None for it in train(kind)])
"""
"""Each turn takes 25 MiB, of which 10 to 15 stay from the turn before if its model does."""


@pytest.mark.parametrize("budget", ["22MiB", "18MiB", "14MiB"])
@pytest.mark.parametrize("gradients", ["no_grad", "enable_grad"])
def test_a_model_and_its_optimizer_go_when_the_script_lets_go_of_them(
    tmp_path: Path, budget: str, gradients: str
):
    """The executor of the last pass held both until another model's first."""
    code, fitting = TURNS.replace("no_grad", gradients), ("--forbid", "offload_parameters")
    ran = inline(tmp_path, budget, code, offload=str(tmp_path), fitting=fitting)
    assert len(ran.loops) == 2
    assert ran.fitting["verdict"]["kept"], ran.stderr
