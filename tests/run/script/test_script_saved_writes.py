"""``memfit run --budget`` on models that write through ``.data`` to what autograd has saved.

torch counts no version there, so backward reads what the write left: recorded, planned, offloaded
and off the plan alike. The script prints gradients of a weight whose formula reads that tensor.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

MASKED = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 256)
            self.last = nn.Linear(256, 8)

        def forward(self, x, strays):
            if strays:
                x = x.abs()
            hidden = torch.tanh(self.first(x)).relu() * 1.5
            wide = self.second(hidden)
            if "after" not in sys.argv:
                hidden.data.masked_fill_(hidden.data > 0.3, 0.0)
            return self.last(torch.relu(wide) * 2.0), hidden

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        strays = step > 3 and "strays" in sys.argv
        out, hidden = model(torch.randn(2048, 64), strays)
        if "after" in sys.argv:
            hidden.data.masked_fill_(hidden.data > 0.3, 0.0)
        del hidden
        loss = out.square().mean()
        loss.backward()
        print(repr(loss.item()), [repr(p.grad.double().sum().item()) for p in model.parameters()])
        optimizer.step()
"""


WORDS = pytest.mark.parametrize("words", [(), ("strays",), ("after",)])


@WORDS
@pytest.mark.parametrize("budget", ["10GiB", "70%", "45%"])
def test_backward_reads_what_a_write_to_a_saved_tensor_left(
    tmp_path: Path, budget: str, words: tuple[str, ...]
):
    ran = inline(tmp_path, budget, MASKED, *words)
    [loop] = ran.loops
    assert loop["planned"]["steps"] >= 3
    if budget != "10GiB":
        assert loop["plan"]["actions"]


@WORDS
def test_it_does_so_from_where_the_tensor_is_offloaded(tmp_path: Path, words: tuple[str, ...]):
    ran = inline(tmp_path, "75%", MASKED, *words, offload="chosen", fitting=("--forbid", "remat"))
    [loop] = ran.loops
    assert loop["planned"]["steps"] >= 3
    assert "offload" in {action["kind"] for action in loop["plan"]["actions"]}


@WORDS
def test_it_does_so_where_steps_run_as_recorded(tmp_path: Path, words: tuple[str, ...]):
    ran = inline(tmp_path, "60%", MASKED, *words, offload="chosen")
    [loop] = ran.loops
    assert loop["planned"]["steps"] >= 3
    assert any("run as recorded" in note for note in loop["notes"])
