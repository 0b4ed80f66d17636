"""Random small networks, random channels: the pruned model is the masked one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked import masked
from torch import Tensor, nn

import memfit
from memfit.errors import WorkloadError
from memfit.prune.trial import separable


class Network(nn.Module):
    """Layers on images or rows, drawn from a seed: straight, with a shortcut, or side by side."""

    def __init__(self, seed: int, *, on_images: bool) -> None:
        super().__init__()
        self.choose = random.Random(seed)
        self.on_images = on_images
        self.kinds: list[str] = []
        self.layers = nn.ModuleList()
        width = 3
        for _ in range(self.choose.randint(2, 5)):
            width = self.add(width)
        self.flat = on_images and self.choose.random() < 0.5
        self.last = nn.Linear(width * 16 if self.flat else width, 3)

    def add(self, width: int) -> int:
        """Add layers; returns how wide their output is."""
        kind = self.choose.choice(
            ["plain", "norm", "shortcut", "cat", "depthwise", "gate", "grouped"]
        )
        wide = self.choose.choice([4, 6, 8, 12])
        if kind in {"shortcut", "depthwise"}:
            wide = width
        if kind == "grouped":
            wide = 2 * width
        self.kinds.append(kind)
        self.layers.append(nn.ModuleList(self.parts(kind, width, wide)))
        return width + wide if kind == "cat" else wide

    def parts(self, kind: str, width: int, wide: int) -> list[nn.Module]:
        if kind == "gate":
            return [self.layer(width, 2 * wide)]
        if kind == "norm":
            normalises = nn.BatchNorm2d(wide) if self.on_images else nn.BatchNorm1d(wide)
            return [self.layer(width, wide), normalises]
        if kind == "shortcut":
            return [self.layer(width, 5), self.layer(5, wide)]
        if kind in {"depthwise", "grouped"} and self.on_images:
            return [nn.Conv2d(width, wide, 3, padding=1, groups=width)]
        return [self.layer(width, wide)]

    def layer(self, ins: int, outs: int) -> nn.Module:
        return nn.Conv2d(ins, outs, 3, padding=1) if self.on_images else nn.Linear(ins, outs)

    def forward(self, x: Tensor) -> Tensor:
        for kind, parts in zip(self.kinds, self.layers, strict=True):
            first, *others = parts
            out = first(x)
            for other in others:
                out = other(torch.relu(out))
            if kind == "gate":
                left, right = out.chunk(2, 1)
                out = left * torch.sigmoid(right)
            x = torch.cat([x, out], 1) if kind == "cat" else out + x if kind == "shortcut" else out
            x = torch.tanh(x)
        if self.on_images:
            x = x.flatten(1) if self.flat else x.mean((2, 3))
        result: Tensor = self.last(x)
        return result


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), on_images=st.booleans())
def test_any_channels_of_any_network_can_go(*, seed: int, on_images: bool) -> None:
    torch.manual_seed(seed)
    model = Network(seed, on_images=on_images)
    batch = torch.randn(2, 3, 4, 4) if on_images else torch.randn(5, 3)

    def loss(model: Any, batch: Any) -> Tensor:
        out: Tensor = model(batch).square().mean()
        return out

    workload = memfit.Workload(model, batch, loss)
    found = separable(workload, through_norms=False)
    choose = random.Random(seed)
    removed = tuple(
        tuple(sorted(choose.sample(range(group.channels), choose.randrange(group.channels))))
        for group in found.groups
    )
    pruned = found.without(removed, weights=True)
    found.require_as_meant(removed, pruned)
    with torch.no_grad():
        whole = masked(model, found.groups, removed).eval()(batch)
        assert torch.allclose(pruned.model.eval()(batch), whole, rtol=1e-5, atol=1e-5)
    gone = sum(map(len, removed))
    counts = [sum(it.numel() for it in one.parameters()) for one in (pruned.model, model)]
    assert counts[0] < counts[1] if gone else counts[0] == counts[1]


def test_a_step_that_fails_by_itself_is_the_users() -> None:
    workload = memfit.Workload(nn.Linear(3, 4), torch.randn(2, 5))
    with pytest.raises(WorkloadError):
        memfit.prune(workload, parameters="50%")
