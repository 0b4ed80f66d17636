"""What is said of a peak that lies in a backward whose ops memfit sees."""

from __future__ import annotations

from pathlib import Path

from ran import inline


def test_what_a_backward_holds_is_no_value_of_its_line(tmp_path: Path):
    """Nine matrices of 4 MiB, of a product, its angle to a parameter, and their gradients."""
    ran = inline(
        tmp_path,
        "16MiB",
        """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.other = nn.Parameter(torch.tensor(0.07))
        def forward(self, x):
            x = self.layer(x)
            return torch.atan2(x @ x.t(), self.other)

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(4):
        loss = nn.functional.cross_entropy(net(torch.randn(1024, 64)), torch.arange(1024))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """,
    )
    assert "9 tensors: gradients of activations and scratch memory of a backward" in ran.stderr
    assert "a value of" not in ran.stderr
