"""Passes that no update follows: their peaks are the script's, and not those of its steps."""

from __future__ import annotations

from pathlib import Path

from ran import inline


def test_the_peak_of_steps_is_that_of_passes_that_came_to_their_end(tmp_path: Path):
    """As where a script measures its gradients on many batches at once, between two steps."""
    ran = inline(
        tmp_path,
        "1GiB",
        """
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        def step():
            optimizer.zero_grad()
            loss = model(torch.randn(1024, 64)).square().mean()
            loss.backward()
            optimizer.step()
            print(loss.item())

        for _ in range(4):
            step()
        losses = [model(torch.randn(1024, 64)).square().mean() for _ in range(8)]
        gradients = torch.autograd.grad(sum(losses), list(model.parameters()))
        print(sum(it.square().sum() for it in gradients).item())
        del losses, gradients
        for _ in range(2):
            step()
        """,
    )
    [loop] = ran.loops
    assert loop["planned"]["steps"] == 5
    assert loop["planned"]["peak_bytes"] == loop["plan"]["predicted_peak_bytes"]
    [device] = ran.report["devices"]
    assert device["peak_bytes"] > 4 * loop["planned"]["peak_bytes"]
