"""Nine architectures, dropout on: loss, gradients, buffers and random state are bitwise equal.

Once with ops dropped, once with everything stored that can be, once with both.
"""

from __future__ import annotations

import contextlib

import models
import pytest
import torch
from handmade import cheap, record

from memfit.apply.offload.tiers import DiskTier
from memfit.apply.remat.remat import Rematerialiser


def run(model, batch, loss_of, context):
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    with context:
        loss = loss_of(model, batch)
    loss.backward()
    result = {
        "loss": loss.detach(),
        "random": torch.get_rng_state(),
        **{f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None},
        **{f"buffer {n}": b.clone() for n, b in model.named_buffers()},
    }
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    return result


def same(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


@pytest.mark.parametrize("build", models.ALL, ids=lambda f: f.__name__)
def test_bitwise(build):
    torch.manual_seed(0)
    model, batch, loss_of = build()
    model.train()
    expected = run(model, batch, loss_of, contextlib.nullcontext())
    ops = record(model, lambda: loss_of(model, batch))
    repeated = run(model, batch, loss_of, contextlib.nullcontext())
    assert same(expected, repeated) == [], "the model itself is not deterministic"
    for drop in (cheap, lambda _: True):
        remat = Rematerialiser(model, ops.remat(drop))
        got = run(model, batch, loss_of, remat.forward())
        outcome = remat.outcome()
        assert outcome.observations.divergence == ""
        assert outcome.observations.kept_drops == []
        assert outcome.observations.dropped_saves > 10
        assert same(expected, got) == []


@pytest.mark.parametrize("build", models.ALL, ids=lambda f: f.__name__)
def test_bitwise_with_everything_stored_that_can_be(build, tmp_path):
    torch.manual_seed(0)
    model, batch, loss_of = build()
    model.train()
    expected = run(model, batch, loss_of, contextlib.nullcontext())
    ops = record(model, lambda: loss_of(model, batch), backward=True)
    window_bytes = 20_000
    everything = ops.offload(window_bytes=window_bytes)
    costly = ops.offload(lambda m: not cheap(m), window_bytes)
    drops = ops.remat(cheap)
    tier = DiskTier(window_bytes, tmp_path, allow_memory=True)
    for remat, offload in ((None, everything), (drops, costly)):
        planned = Rematerialiser(model, remat, offload, tier)
        got = run(model, batch, loss_of, planned.forward())
        outcome = planned.outcome()
        assert outcome.observations.divergence == ""
        assert outcome.observations.kept_drops == []
        assert outcome.offloaded == len(offload["stores"]) > 0
        assert same(expected, got) == []
    stored = sum(m["bytes"] for m in (*everything["stores"], *costly["stores"]))
    assert tier.moved().bytes_written == stored


@pytest.mark.parametrize("build", [models.gpt2, models.resnet18], ids=lambda f: f.__name__)
def test_bitwise_when_only_some_module_calls_are_watched(build):
    torch.manual_seed(0)
    model, batch, loss_of = build()
    model.train()
    expected = run(model, batch, loss_of, contextlib.nullcontext())
    ops = record(model, lambda: loss_of(model, batch))
    wanted = [key for key in ops.calls if key[0] in {"transformer.h.1", "layer2", "layer4.0"}]
    remat = Rematerialiser(model, ops.remat(regions=wanted))
    got = run(model, batch, loss_of, remat.forward())
    outcome = remat.outcome()
    assert outcome.observations.divergence == ""
    assert outcome.observations.dropped_saves > 5
    assert same(expected, got) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_autocast_in_use():
    torch.manual_seed(0)
    model, batch, own_loss = models.gpt2()
    model.train()

    def loss_of(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model, batch)

    expected = run(model, batch, loss_of, contextlib.nullcontext())
    ops = record(model, lambda: loss_of(model, batch))
    remat = Rematerialiser(model, ops.remat())
    got = run(model, batch, loss_of, remat.forward())
    assert remat.outcome().observations.divergence == ""
    assert same(expected, got) == []
