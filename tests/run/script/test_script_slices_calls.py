"""``memfit run --allow equivalent``: wide layers in slices, and what would see those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ran import inline

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

torch.manual_seed(0)
width, wide, seen = 32, 2048, []


class Block(nn.Module):
    tells = False

    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.LayerNorm(width), 0
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x):
        KEEPS
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Names(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if step >= 4 and func.__name__ == "linear":
            seen.append(tuple(result.shape))
        return result


model = nn.Sequential(nn.Linear(width, width), Block(), Block(), nn.Linear(width, 1))
block = model[1]
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(6):
    if step == 4:
        LATE
    x = torch.randn(8, 128, width)
    optimizer.zero_grad()
    with Names() if WITH else torch.enable_grad():
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.3f}", block.calls, getattr(block, "kept", x).shape)
print(seen)
"""

LATE = {
    "a hook": "block.up.register_forward_hook(lambda m, a, o: seen.append(tuple(o.shape)))",
    "a hook before": "block.up.register_forward_pre_hook(lambda m, a: seen.append(len(a[0])))",
    "a forward": "block.up.forward = (lambda x, f=block.up.forward: seen.append(len(x)) or f(x))",
    "its forward": "block.forward = (lambda x, f=block.forward: seen.append(len(x)) or f(x))",
    "a forward of a class": "nn.Linear.forward = "
    "(lambda m, x, f=nn.Linear.forward: seen.append(len(x)) or f(m, x))",
    "a hook on all modules": "nn.modules.module.register_module_forward_hook("
    "lambda m, a, o: seen.append(tuple(o.shape)))",
    "a hook in backward": "block.down.register_full_backward_hook("
    "lambda m, g, o: seen.append(tuple(o[0].shape)))",
}
KEEPS = {
    "a counter": "self.calls += 1",
    "a counter that counts late": "self.calls += step >= 4",
    "features": "self.kept = self.norm(x)",
}


def kinds(tmp_path: Path, late: str = "pass", keeps: str = "pass", within: str = "False") -> Any:
    code = SCRIPT.replace("LATE", late).replace("KEEPS", keeps).replace("WITH", within)
    options = ("--allow", "equivalent", "--forbid", "remat", "--forbid", "micro_batch")
    (loop,) = inline(tmp_path, "20MiB", code, fitting=options).loops
    return [action["kind"] for action in loop["plan"]["actions"]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_what_comes_to_see_a_layer_later_sees_it_whole(tmp_path: Path, late: str):
    assert "chunk" in kinds(tmp_path, late)


def test_a_function_mode_sees_whole_calls(tmp_path: Path):
    assert "chunk" in kinds(tmp_path, within="step >= 4")


@pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS)
def test_a_layer_that_keeps_something_from_a_call_runs_whole(tmp_path: Path, keeps: str):
    assert "chunk" not in kinds(tmp_path, keeps=keeps)
