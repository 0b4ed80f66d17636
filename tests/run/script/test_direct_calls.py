"""Training that calls `forward` itself, and training of what a model is called with."""

from __future__ import annotations

from pathlib import Path

from ran import inline

DIRECT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = [(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
        self.layers = nn.Sequential(*[layer for pair in pairs for layer in pair])

    def forward(self, x):
        return self.layers(x)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(5):
    x = torch.randn(2048, 256)
    loss = net.forward(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""

IMAGE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())])
net.requires_grad_(False)
image = torch.randn(4, 8, 64, 64, requires_grad=True)
optimizer = torch.optim.Adam([image], lr=0.01)
for step in range(5):
    loss = net(image).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def planned(tmp_path: Path, script: str) -> dict:
    ran = inline(tmp_path, "70%", script)
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 3
    assert loop["unplanned"]["steps"] == 0
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]
    return loop


def test_a_script_that_calls_forward_itself_is_planned(tmp_path: Path):
    loop = planned(tmp_path, DIRECT)
    assert loop["models"] == ["Net"]
    assert loop["plan"]["fits"]


def test_a_frozen_model_is_planned_where_its_input_is_trained(tmp_path: Path):
    assert planned(tmp_path, IMAGE)["plan"]["actions"]


def test_each_layer_that_is_trained_alone_is_a_loop_of_its_own(tmp_path: Path):
    script = """
import torch
from torch import nn

class Layer(nn.Linear):
    def __init__(self):
        super().__init__(256, 256)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def forward(self, x):
        return super().forward(x).relu().tanh()

    def train_alone(self, x):
        for _ in range(3):
            loss = self.forward(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print(loss.item())
        return self.forward(x).detach()

torch.manual_seed(0)
x = torch.randn(2048, 256)
for layer in [Layer(), Layer()]:
    x = layer.train_alone(x)
"""
    ran = inline(tmp_path, "90%", script)
    assert [loop["models"] for loop in ran.loops] == [["Layer"], ["Layer"]]
    assert all(loop["observed"]["steps"] + loop["planned"]["steps"] == 3 for loop in ran.loops)
    assert all(loop["planned"]["steps"] for loop in ran.loops)
