"""Optimizer state in 8 bits, and lower halves with it, offloaded slice by slice."""

from __future__ import annotations

import weakref

import pytest
import torch
from test_half_parameters import momentum, pictures, words

import memfit
from memfit.apply.executor import Executor, Subject
from memfit.apply.offload import byte_slices
from memfit.apply.precision.eight_bit_state import EightBitState
from memfit.errors import OffloadError, UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.tensors.narrow_parameters import is_narrow, lower_half

ALONE = ("chunk", "micro_batch", "offload_parameters", "offload")
BOTH = {"optimizer_bits", "offload_optimizer"}
SMALL = 1024
"""Numbers of a slice in tests: whole blocks."""


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(byte_slices, "SLICE", SMALL)


def planned(load, budget, folder, **options):
    options = {"allow": "half_parameters", "forbid": ALONE} | options
    return memfit.plan(load, budget, offload=str(folder), **options)


def least(load, folder, **options):
    found = planned(load, "1KiB", folder, **options)
    return planned(load, found.minimum_budget_bytes, folder, **options)


def kinds(plan):
    return {action.kind for action in plan.actions}


def without(plan, kind):
    return {"actions": [it for it in plan.as_dict()["actions"] if it["kind"] != kind]}


def states(optimizer):
    return [state for state in optimizer.state.values() if isinstance(state, EightBitState)]


def trained(load, plan, folder, steps=4):
    with memfit.Fitted(load, plan, offload_dir=str(folder)) as fitted:
        losses = [fitted.step().detach() for _ in range(steps)]
        saved = fitted.optimizer.state_dict()["state"]
    return [*losses, *load.model.state_dict().values()], saved


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, momentum])
@pytest.mark.parametrize("build", [words, pictures])
@pytest.mark.parametrize("allow", ["half_parameters", "optimizer_bits"])
def test_a_planned_step_takes_what_is_predicted_and_gives_the_bits_of_the_same_in_memory(
    build, optimizer, allow, tmp_path
):
    load = build(optimizer=optimizer)
    plan = least(load, tmp_path, allow=allow)
    assert plan.fits
    assert kinds(plan) >= BOTH
    here = least(load, tmp_path, allow=allow, forbid=(*ALONE, "offload_optimizer"))
    assert plan.minimum_peak_bytes < here.minimum_peak_bytes
    with memfit.Fitted(load, plan) as fitted:
        for _ in range(2):
            fitted.step()
        measured = measure_peak(fitted.step, static_tensors(load, fitted.optimizer))
        held = [tensor for it in states(fitted.optimizer) for tensor in it.in_memory().values()]
    assert measured.peak_bytes == pytest.approx(plan.planned.predicted_peak_bytes, rel=1e-3)
    assert measured.peak_bytes <= plan.budget_bytes
    assert measured.left_bytes == 0 or build is pictures  # batch norms are given new statistics
    assert sum(tensor.nbytes for tensor in held) <= 4 * len(held), "counts of steps alone"
    found, saved = trained(build(optimizer=optimizer), plan, tmp_path)
    expected, known = trained(build(optimizer=optimizer), without(plan, "offload_optimizer"), "")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for number, values in known.items():
        assert saved[number].keys() == values.keys()
        same = (torch.equal(saved[number][key], it) for key, it in values.items() if it is not None)
        assert all(same)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, momentum])
def test_slices_give_the_bits_of_the_whole(optimizer, tmp_path):
    plan = least(words(optimizer=optimizer), tmp_path)
    found, _ = trained(words(optimizer=optimizer), plan, tmp_path)
    expected, _ = trained(words(optimizer=optimizer), without(plan, "offload_optimizer"), "")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_falls_is_the_state_but_for_a_slice(tmp_path):
    load = words(width=1024, rows=1)
    forbid = (*ALONE, "fuse_optimizer", "remat")
    (here, away) = (
        planned(load, "1KiB", tmp_path, forbid=(*forbid, *more)).minimum_peak_bytes
        for more in (("offload_optimizer",), ())
    )
    large = [p.numel() for p in load.model.parameters() if p.numel() >= 4096]
    # Two moments of a byte; the least of those that stay keeps no lower halves.
    stays = sum(2 * (n + 4 * -(-n // 256)) for n in large)
    slice_bytes = 2 * ((1 << 20) + 4 * (1 << 20) // 256) + 2 * (1 << 20)
    small = sum(2 * p.nbytes for p in load.model.parameters() if 1024 <= p.numel() < 4096)
    assert stays + small - slice_bytes <= here - away <= stays + small


def test_between_steps_there_are_two_bytes_a_parameter(tmp_path):
    load = words(width=512, rows=1)
    plan = least(load, tmp_path)
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        held = sum(t.nbytes for t in static_tensors(load, fitted.optimizer))
        wide = sum(p.nbytes for p in load.model.parameters() if not is_narrow(p))
        narrow = sum(p.nbytes for p in load.model.parameters() if is_narrow(p))
    numbers = sum(p.numel() for p in load.model.parameters())
    assert held - wide - narrow < 0.02 * numbers, "small state, the batch and counts"


@pytest.mark.usefixtures("small_slices")
def test_others_see_a_plain_optimizer_and_go_on_in_the_same_bits(tmp_path):
    plan = least(words(), tmp_path)
    losses = [looked_at(words(), it) for it in (plan, without(plan, "offload_optimizer"))]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def looked_at(load, plan):
    """Losses of steps between which somebody reads, keeps, saves and loads the state."""
    with memfit.Fitted(load, plan) as fitted:
        losses = [fitted.step().detach() for _ in range(2)]
        optimizer, weight = fitted.optimizer, load.model.up.weight
        saved = optimizer.state_dict()
        assert all(type(state) is dict for state in saved["state"].values())
        assert all(state.is_narrow(optimizer) for state in states(optimizer)), "as it was"
        moment = optimizer.state[weight]["exp_avg"]
        assert moment.dtype is torch.float32
        losses.append(fitted.step().detach())  # it is kept meanwhile, in 32 bits
        assert optimizer.state[weight]["exp_avg"] is moment
        del moment
        losses.append(fitted.step().detach())
        assert all(state.is_narrow(optimizer) for state in states(optimizer))
        optimizer.load_state_dict(saved)
        losses += [fitted.step().detach() for _ in range(2)]
    assert not states(optimizer), "closed, it is at home"
    return [*losses, *load.model.state_dict().values()]


@pytest.mark.usefixtures("small_slices")
def test_lower_halves_come_back_to_the_bit_unless_somebody_wrote(tmp_path):
    load = words()
    before = {name: p.detach().clone() for name, p in load.model.named_parameters()}
    fitted = memfit.Fitted(load, least(load, tmp_path))
    fitted.place_state()
    assert not isinstance(lower_half(load.model.up.weight), torch.Tensor)
    with torch.no_grad():
        load.model.down.weight.fill_(3.0)
    fitted.close()
    after = dict(load.model.named_parameters())
    assert torch.equal(after["down.weight"], torch.full_like(after["down.weight"], 3.0))
    assert all(torch.equal(after[name], before[name]) for name in after if name != "down.weight")


def test_another_plan_has_it_in_memory_and_goes_on_in_the_same_bits(tmp_path):
    plan = least(words(), tmp_path)

    def steps(plans):
        load = words()
        optimizer = torch.optim.AdamW(load.model.parameters())
        executor = None
        for said in plans:
            executor = Executor(said, Subject(weakref.ref(load.model), optimizer), after=executor)
            executor.place()
            with executor.running(), executor.forward():
                loss = load.loss(load.model, load.batch)
            loss.backward()
            executor.update_all().finish()
            optimizer.zero_grad()
        return [p.detach().clone() for p in load.model.parameters()]

    kept = {"half_parameters", "autocast", "optimizer_bits", "offload_optimizer"}
    away = {"actions": [it for it in plan.as_dict()["actions"] if it["kind"] in kept]}
    here = without_kind(away)
    mixed, same = steps([away, away, here, away]), steps([here] * 4)
    assert all(torch.equal(a, b) for a, b in zip(mixed, same, strict=True))


def without_kind(plan):
    return {"actions": [it for it in plan["actions"] if it["kind"] != "offload_optimizer"]}


class _FullTier:
    """A place that can be full."""

    def __init__(self, tier):
        self.tier, self.is_full = tier, False

    def refusal(self, device):
        return self.tier.refusal(device)

    def send(self, source):
        if self.is_full:
            raise OffloadError("no space left")
        return self.tier.send(source)


def test_what_cannot_be_written_stays_and_no_step_begins(tmp_path):
    load, plain = words(), words()
    plan = least(load, tmp_path)
    with memfit.Fitted(plain, plan) as fitted:
        for _ in range(4):
            fitted.step()
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        part = fitted._usual._parts["optimizer_bits"]
        full = part.tier = _FullTier(part.tier)
        fitted.step()
        full.is_full = True
        fitted.step()
        with pytest.raises(OffloadError, match=r"no space left; .* stay in memory, unchanged"):
            fitted.step()
        held = sum(t.nbytes for t in static_tensors(load, fitted.optimizer))
        full.is_full = False
        fitted.step()
        assert sum(t.nbytes for t in static_tensors(load, fitted.optimizer)) < held
    pairs = zip(load.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_updates_that_are_rounded_are_not_offloaded():
    load = words()
    names = ["up.weight"]
    directions = {"tier": "disk", "window_bytes": 0, "least_bytes": 4096, "order": []}
    actions = [
        {"kind": "half_parameters", "half_parameters": {"names": names}},
        {"kind": "optimizer_bits", "optimizer_bits": {"names": names}},
        {"kind": "offload_optimizer", "offload_optimizer": directions},
    ]
    optimizer = torch.optim.AdamW(load.model.parameters())
    with pytest.raises(UsageError, match="has to keep their lower halves"):
        Executor({"actions": actions}, Subject(weakref.ref(load.model), optimizer))
