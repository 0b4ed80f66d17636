"""Models that a script copies or pickles whole, at any moment, have nothing of memfit's on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

COPIES = """
    import copy, io, torch
    from torch import nn

    torch.manual_seed(0)
    def on(model):
        names = ("_forward_hooks", "_forward_pre_hooks")
        return any(getattr(it, n) for it in model.modules() for n in names) or any(
            "forward" in vars(it) for it in model.modules()
        )
    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        return len(file.getvalue()), on(torch.load(io.BytesIO(file.getvalue()), weights_only=False))

    model = nn.Sequential(*[it for _ in range(6) for it in (nn.Linear(512, 512), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(6):
        x = torch.randn(1024, 512)
        out = model(x)
        if step % 2:
            print(on(copy.deepcopy(model)), saved(model))
        loss = nn.functional.mse_loss(out, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    model(x[:4])
    print(on(copy.deepcopy(model)), saved(model))
    torch.save(model.state_dict(), "trained.pt")
"""
"""A step takes 34 MiB, and a copy 6 on top."""


@pytest.mark.parametrize("budget", ["34MiB", "32MiB"])
def test_a_model_is_copied_and_saved_while_a_forward_is_planned(tmp_path: Path, budget: str):
    """`torch.save` met a hook that cannot be pickled, and ended the script."""
    ran = inline(tmp_path, budget, COPIES)
    (loop,) = ran.loops
    assert loop["planned"]["steps"] >= 3
    assert loop["plan"]["actions"]
