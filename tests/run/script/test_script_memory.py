"""A model that is given what its last step returned, as segment recurrence does."""

from __future__ import annotations

from pathlib import Path

from ran import inline

SCRIPT = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x, *memory):
            kept = []
            for layer, before in zip(self.layers, memory or [x[:0]] * 6):
                # A part of more, which lives on with it.
                kept.append(torch.cat([before, x.detach()])[-1024:])
                seen = torch.cat([before, x])
                x = torch.tanh(layer(seen))[-1024:] + 0.1
            return [x.square().mean(), *kept]

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    memory = ()
    for step in range(8):
        loss, *memory = model(torch.randn(1024, 64), *memory)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
"""


def test_what_a_step_is_given_of_the_last_one_is_foreseen(tmp_path: Path):
    ran = inline(tmp_path, "9MiB", SCRIPT)
    assert ran.fitting["verdict"]["kept"], ran.stderr
    (loop,) = ran.loops
    planned = loop["planned"]
    assert planned["steps"] >= 5
    assert planned["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]
