"""``memfit run --allow equivalent``: messages of a graph network in slices of edges."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import Ran, inline

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
nodes, edges, width = 1000, 20000, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        wide = 2 * width + 4
        self.message = nn.Sequential(nn.Linear(wide, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Linear(2 * width, width)

    def forward(self, x, source, target, features):
        messages = self.message(torch.cat([x[source], x[target], features], dim=-1))
        CHANGE
        sums = torch.zeros_like(x).index_add_(0, target, messages)
        return F.relu(self.update(torch.cat([x, sums], dim=-1)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(width, 3)

    def forward(self, x, source, target, features):
        for layer in self.layers:
            x = layer(x, source, target, features)
        return self.head(x)


source, target = torch.randint(0, nodes, (2, edges))
x, features = torch.randn(nodes, width), torch.randn(edges, 4)
y, trains = torch.randint(0, 3, (nodes,)), torch.randperm(nodes)[:500]
model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(7):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, source, target, features)[trains], y[trains])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        right = (model(x, source, target, features).argmax(-1) == y).float().mean()
    print(step, f"{loss.item():.3f}", f"{right.item():.2f}")
"""


def found(tmp_path: Path, budget: str, *options: str, change: str = "pass") -> Ran:
    tmp_path.mkdir(exist_ok=True)
    code = SCRIPT.replace("CHANGE", change)
    return inline(tmp_path, budget, code, fitting=("--allow", "equivalent", *options), fuses=True)


def kinds(ran: Ran) -> list[str]:
    (loop,) = ran.loops
    return [action["kind"] for action in loop["plan"]["actions"]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_budget_is_kept_from_the_first_step_on_that_no_other_plan_keeps(tmp_path: Path):
    without = found(tmp_path / "without", "7MiB", "--forbid", "chunk")
    assert "the smallest peak that keeps the script's own loop is 14." in without.stderr
    ran = found(tmp_path / "with", "7MiB")
    assert "chunk" in kinds(ran)
    assert "kept: 3." in ran.stderr
    assert "with messages along edges in slices" in ran.stderr


def test_where_the_budget_is_a_part_of_the_first_step_later_ones_run_in_slices(tmp_path: Path):
    ran = found(tmp_path, "20%")
    assert "chunk" in kinds(ran)


CHANGES = {
    "random numbers": "messages = F.dropout(messages, 0.1 * (self is model.layers[1]))",
    "all edges": "messages = messages - x[source].mean(0) * (self is model.layers[1])",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_messages_that_need_more_than_their_edge_are_whole_and_others_in_slices(
    tmp_path: Path, change: str
):
    ran = found(tmp_path, "14MiB", change=change)
    assert "chunk" in kinds(ran)
    assert "kept: " in ran.stderr
