"""Autocast in float16: the loss scale, beside torch's own scaler, and steps that overflow."""

from __future__ import annotations

import pytest
import torch
from test_autocast import Classifier, workload
from torch import nn
from torch.nn import functional

import memfit
from memfit.apply.precision.loss_scale import LossScale
from memfit.workload import Workload

STEPS = 4


def plan_of(pieces=1, *, cache=True, more=()):
    actions = [{"kind": "autocast_fp16", "autocast_fp16": {"dtype": "float16", "cache": cache}}]
    if pieces > 1:
        actions.append({"kind": "micro_batch", "count": pieces, "micro_batch": None})
    return {"actions": [*actions, *more]}


def clipped(rows=48, **form):
    load = workload(rows=rows, **form)
    load.clip_grad_norm = 0.5
    return load


def by_hand(load, pieces, scaler, steps=STEPS, poisoned=()):
    """The loop of the articles: scale, backward, unscale, clip, step, update."""
    model, optimizer = load.model, load.optimizer(load.model.parameters())
    losses = []
    for number in range(steps):
        features, labels = batch_of(load, number, poisoned)
        rows = len(labels) // pieces
        total = torch.zeros(())
        for piece in range(pieces):
            part = slice(piece * rows, (piece + 1) * rows)
            with torch.autocast("cpu", torch.float16):
                loss = functional.cross_entropy(model(features[part]), labels[part])
            total += loss.detach() / pieces
            scaler.scale(loss * (1 / pieces)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def batch_of(load, number, poisoned):
    features, labels = load.batch
    return (features * float("inf") if number in poisoned else features, labels)


@pytest.mark.parametrize("pieces", [1, 3])
def test_steps_are_to_the_bit_those_of_the_loop_with_torchs_scaler(pieces):
    load, own = clipped(), clipped()
    scaler = torch.amp.GradScaler("cpu")
    fitted = memfit.Fitted(load, plan_of(pieces), loss_reduction="mean")
    torch.manual_seed(3)
    losses = [fitted.step() for _ in range(STEPS)]
    torch.manual_seed(3)
    expected = by_hand(own, pieces, scaler)
    assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-6)
    for mine, theirs in zip(load.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert fitted.scaler_state_dict() == scaler.state_dict()
    assert fitted.report().skipped_steps == 0


def test_an_overflow_updates_nothing_halves_the_scale_and_is_counted():
    load, own = clipped(), clipped()
    scaler = torch.amp.GradScaler("cpu")
    fitted = memfit.Fitted(load, plan_of())
    torch.manual_seed(3)
    for number in range(STEPS):
        before = [p.detach().clone() for p in load.model.parameters()]
        state = [s["exp_avg"].clone() for s in fitted.optimizer.state.values()]
        fitted.step(batch_of(load, number, {2}))
        assert fitted.has_skipped_update == (number == 2)
        same = [torch.equal(a, b) for a, b in zip(before, load.model.parameters(), strict=True)]
        assert all(same) if number == 2 else not any(same)
        if number == 2:
            after = [s["exp_avg"] for s in fitted.optimizer.state.values()]
            assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
            assert fitted.loss_scale == 2.0**15
        assert all(p.grad is None for p in load.model.parameters())
    report = fitted.report()
    assert (report.steps, report.skipped_steps, report.loss_scale) == (STEPS, 1, 2.0**15)
    torch.manual_seed(3)
    by_hand(own, 1, scaler, poisoned={2})
    for mine, theirs in zip(load.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert fitted.scaler_state_dict() == scaler.state_dict()


def test_updates_one_by_one_and_offloaded_state_are_skipped_alike(tmp_path):
    plain, away = clipped(), clipped()
    order = [name for name, _ in away.model.named_parameters()]
    offload = {
        "kind": "offload_optimizer",
        "offload_optimizer": {
            "tier": "disk",
            "folder": str(tmp_path),
            "window_bytes": 0,
            "least_bytes": 1024,
            "order": order,
        },
    }
    seen = []
    for load, more in ((plain, ()), (away, (offload,))):
        with memfit.Fitted(load, plan_of(more=more)) as fitted:
            torch.manual_seed(3)
            for number in range(STEPS):
                fitted.step(batch_of(load, number, {1}))
            assert fitted.report().skipped_steps == 1
        seen.append(list(load.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_checkpoint_goes_on_with_the_scale():
    first = memfit.Fitted(clipped(), plan_of())
    first.step(batch_of(first.workload, 0, {0}))
    saved = first.scaler_state_dict()
    again = memfit.Fitted(clipped(), plan_of())
    again.load_scaler_state_dict(saved)
    assert again.loss_scale == 2.0**15
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(saved)
    again.load_scaler_state_dict(torchs.state_dict())
    assert again.scaler_state_dict() == saved


def test_it_is_planned_by_its_name_alone_and_never_with_updates_inside_backward():
    load = workload(rows=64)
    forbid = ("chunk", "micro_batch")
    wide = memfit.plan(load, "80%", allow="approximate", forbid=(*forbid, "shrink"))
    assert "autocast_fp16" not in {action.kind for action in wide.actions}
    plan = memfit.plan(workload(), "70%", allow="autocast_fp16", forbid=forbid)
    kinds = {action.kind for action in plan.actions}
    assert "autocast_fp16" in kinds
    assert "fuse_optimizer" not in kinds
    assert any("slow on a CPU" in note for note in plan.notes)
    own = memfit.plan(workload(), "70%", allow="autocast_fp16", own_loop=True, forbid=forbid)
    assert "autocast_fp16" in {refusal.kind for refusal in own.refusals}
    both = plan_of(more=({"kind": "fuse_optimizer"},))
    with pytest.raises(memfit.UsageError, match="after the last one"):
        memfit.Fitted(workload(), both)


def test_verify_waits_for_the_scale_and_compares_gradients_as_they_are_without_it():
    others = ("chunk", "micro_batch", "remat", "fuse_optimizer", "one_by_one", "unneeded_saves")
    verdict = memfit.verify(workload, "95%", allow="autocast_fp16", forbid=others)
    assert verdict.holds
    assert 0 < verdict.approximation.gradient_error < 0.02
    assert verdict.approximation.scaled_steps >= 3
    assert verdict.approximation.skipped_steps == 0


def test_a_parameter_in_float16_cannot_be_scaled_back():
    with pytest.raises(memfit.UsageError, match="float16"):
        LossScale().unscale([torch.ones(3, dtype=torch.float16)])
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([2.0**17]), (4,), check_invariants=True
    )
    scale = LossScale()
    assert scale.unscale([sparse, None, torch.full((2,), 2.0**16)])
    assert sparse.coalesce().values().item() == 2


def test_the_loss_may_be_of_16_bits_itself():
    model = Classifier()
    load = Workload(model, torch.randn(32, 64), lambda m, b: m(b).square().mean(), torch.optim.SGD)
    fitted = memfit.Fitted(load, plan_of())
    for _ in range(4):
        fitted.step()
    assert fitted.report().skipped_steps < 4
    assert not fitted.has_skipped_update
