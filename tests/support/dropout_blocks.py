"""A small model with dropout, and its step with a plan and without one, bit for bit."""

from __future__ import annotations

import contextlib

import torch
from handmade import record
from torch import nn

from memfit.apply.remat.remat import Rematerialiser


class Block(nn.Module):
    """A small pre-norm feed-forward block with dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        h = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(h), 0.25)


class Stack(nn.Module):
    """Three blocks; the second is called twice."""

    def __init__(self, wrap=lambda block, x: block(x)):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.wrap = wrap

    def forward(self, x):
        for index in (0, 1, 1, 2):
            x = self.wrap(self.blocks[index], x)
        return x.pow(2).mean()


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def once(model, forward, context, backward=lambda loss: loss.backward()):
    """Loss, gradients and random state of one step whose forward runs inside a context."""
    model.zero_grad()
    torch.manual_seed(3)
    with context:
        loss = forward()
    backward(loss)
    return [loss.detach(), *gradients(model), torch.get_rng_state()]


def compare(model, forward, remat=None, backward=lambda loss: loss.backward(), drop=lambda _: True):
    """Gradients and loss with and without the plan are the same bits."""
    expected = once(model, forward, contextlib.nullcontext(), backward)
    remat = remat or Rematerialiser(model, record(model, forward).remat(drop))
    got = once(model, forward, remat.forward(), backward)
    for a, b in zip(expected, got, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    return remat.outcome()
