"""What a summary says of the peak of steps that a plan transforms, or that run as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import assert_within_budget, inline

SCRIPT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        outputs = model(torch.randn(4096, 64))
        loss = outputs.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("budget", ["15MiB", "12MiB"])
def test_what_a_plan_keeps_for_backward_is_held_by_the_graph(tmp_path: Path, budget: str):
    ran = inline(tmp_path, budget, SCRIPT)
    (loop,) = ran.loops
    assert_within_budget(loop)
    (device,) = ran.report["devices"]
    owners = {one["owner"].split(" (")[0]: one["bytes"] for one in device["peak_owners"]}
    assert owners["the autograd graph of `outputs`"] >= 4 << 20
    assert all(size < 1 << 20 for name, size in owners.items() if name.startswith("a value of"))
    assert device["peak_by_category"]["other"] < 0.01 * device["peak_bytes"]
