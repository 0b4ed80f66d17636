"""Tiers for tensors of a GPU, over copies that end when they are told to, on the CPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from handmade import record
from torch import nn

from memfit._native import Store
from memfit.apply.offload.pinned import PinnedTier, StagedTier
from memfit.apply.offload.tiers import DiskTier, HostTier, Moved
from memfit.apply.remat.remat import Rematerialiser


@dataclass
class Memory:
    bytes: torch.Tensor


class Copy:
    """A copy on its way, which keeps neither end alive."""

    def __init__(self, target, source):
        self.ends = [weakref.ref(t.untyped_storage()) for t in (target, source)]
        self.done = False

    def make(self):
        target, source = (end() for end in self.ends)
        assert source is not None, "a source was let go before it was copied"
        if target is not None:  # fetched ahead and let go: the allocator waits on a real device
            target.copy_(source)
        self.done = True


@dataclass
class LateCopies:
    """Copies that are made only when something has to come after them, all before them first.

    What was let go or used again too early is seen: the copy then takes what lies there.
    """

    queue: list[Copy] = field(default_factory=list)
    pinned_bytes: int = 0
    eager: bool = False

    def refusal(self, device):
        return None

    def pin(self, size_bytes):
        self.pinned_bytes += size_bytes
        return Memory(torch.full((size_bytes,), 0xEE, dtype=torch.uint8))

    def begin(self, target, source):
        assert target.nbytes == source.nbytes
        copy = Copy(target, source)
        self.queue.append(copy)
        return copy

    def order_after(self, end):
        while not end.done:
            self.queue.pop(0).make()

    def is_over(self, end):
        if self.eager:
            self.order_after(end)
        return end.done

    wait = order_after


class Tier(PinnedTier):
    def moved(self):
        return Moved(self.count.written, self.count.read)


class Staged(StagedTier):
    def refusal(self, device):
        return None

    def moved(self):
        return Moved()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).sigmoid(), 0.2) + x
        return x.pow(2).mean()


def gradients(model, x, context):
    model.zero_grad()
    torch.manual_seed(2)
    with context:
        loss = model(x)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def tier_of(kind, copies, folder):
    if kind == "host":
        return Tier(copies)
    return Staged(copies, Store(folder, 1 << 20, allow_memory=True))


@pytest.mark.parametrize("window_bytes", [0, 300, 10**6])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_bitwise_however_late_copies_are(tmp_path, kind, eager, window_bytes):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 16)
    copies = LateCopies(eager=eager)
    tier = tier_of(kind, copies, tmp_path)
    expected = gradients(model, x, contextlib.nullcontext())
    ops = record(model, lambda: model(x), backward=True)
    offload = ops.offload(window_bytes=window_bytes)
    planned = Rematerialiser(model, None, offload, tier)
    for _ in range(3):
        got = gradients(model, x, planned.forward())
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert planned.outcome().offloaded == len(offload["stores"]) > 10
    stored = sum(entry["bytes"] for entry in offload["stores"])
    if kind == "host":
        assert tier.count.written == tier.count.read == 3 * stored
        assert copies.pinned_bytes == stored, "pinned memory is used again, and never rounded up"
    else:
        assert copies.pinned_bytes < stored or window_bytes >= stored


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_step_that_breaks_off_leaves_memory_that_can_be_used(tmp_path, kind):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 16)
    copies = LateCopies()
    tier = tier_of(kind, copies, tmp_path)
    expected = gradients(model, x, contextlib.nullcontext())
    ops = record(model, lambda: model(x), backward=True)
    planned = Rematerialiser(model, None, ops.offload(window_bytes=10**6), tier)

    def fail(_module, _args):
        raise KeyboardInterrupt

    handle = model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), planned.forward():
        model(x)
    handle.remove()
    with planned.forward():
        model(x)  # no backward
    gc.collect()
    got = gradients(model, x, planned.forward())
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("window_bytes", [0, 10**6])
def test_on_cuda(tmp_path, kind, window_bytes):
    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(256, 16, device="cuda")
    expected = gradients(model, x, contextlib.nullcontext())
    ops = record(model, lambda: model(x), backward=True)
    offload = ops.offload(window_bytes=window_bytes)
    tier = HostTier() if kind == "host" else DiskTier(window_bytes, tmp_path, allow_memory=True)
    planned = Rematerialiser(model, None, offload, tier)
    for _ in range(10):
        got = gradients(model, x, planned.forward())
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert planned.outcome().offloaded == len(offload["stores"]) > 10
