"""Scripts that make tensors of numpy's memory, and write to it before backward: same results."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

ROLLOUT = """
    import numpy as np, torch
    from torch import nn

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    buffer = np.zeros((400, 256), np.uint8)
    seen = torch.from_numpy(buffer)
    net = nn.Sequential(
        nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4)
    )
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for update in range(6):
        losses = []
        for step in range(5):
            buffer[:] = random.integers(0, 256, buffer.shape)
            scores = net(seen.float() / 255)
            losses.append(nn.functional.cross_entropy(scores, scores.detach().argmax(1)))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()), repr(net[0].weight.grad.norm().item()))
"""
"""A policy that sees what an environment writes into one array: the graph has floats made of it."""


@pytest.mark.parametrize("offload", [None, "chosen"])
def test_a_rollout_over_one_array_is_not_computed_from_what_is_there_later(
    tmp_path: Path, offload: str | None
):
    ran = inline(tmp_path, "60%", ROLLOUT, offload=offload)
    (loop,) = ran.loops
    assert loop["planned"]["steps"] >= 4
    assert loop["plan"]["actions"]
    assert loop["divergence"] is None
