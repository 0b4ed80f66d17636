"""Saved tensors of compiled graphs elsewhere: same gradients, less memory, errors by name."""

import functools
import gc
import random

import pytest
import torch
import torch.nn.functional as F
from graphs import Convolutions, Transformer, images, run, tokens
from torch import nn

import memfit
from memfit.apply.offload.tiers import DiskTier
from memfit.errors import OffloadError
from memfit.plan import cost_source
from memfit.run.compiled import search, toolchain, transfer_nodes, transfer_ops, transfer_time
from memfit.run.compiled.fitted import CompiledFitted
from memfit.run.compiled.inductor.op_costs import costs
from memfit.run.compiled.inductor.rates import NOMINAL, Place, Rates
from memfit.run.compiled.schedule import KEEP_ALL, Decision, schedule
from memfit.run.compiled.transfer_ops import Transit, moving

FREE = Place(1e15, 1e15)
needs_compiler = pytest.mark.skipif(
    toolchain.missing("cpu") is not None, reason=f"{toolchain.missing('cpu')}"
)


@pytest.fixture(autouse=True)
def _small_tensors_leave(monkeypatch):
    monkeypatch.setattr(transfer_nodes, "LEAST_BYTES", 64)


@pytest.fixture
def transit(tmp_path):
    return Transit(DiskTier(1 << 20, tmp_path))


def models():
    torch.manual_seed(0)
    return [(Transformer(2, 0.0), tokens()), (Convolutions(), images())]


def some_away(seed):
    """Drops some of what may be dropped, and has some of the rest elsewhere."""

    def decide(joint):
        draw = random.Random(seed)
        dropped = frozenset(s for s in joint.droppable() if draw.random() < 0.4)
        saved = schedule(joint, Decision(dropped))
        leaving = [s for s in transfer_nodes.candidates(joint, saved) if draw.random() < 0.7]
        assert leaving, "something leaves, or this tests nothing"
        return Decision(dropped, away=frozenset(leaving))

    return decide


@functools.cache
def of_keeping_everything(which):
    model, batch = models()[which]
    return run(model, batch, lambda _: KEEP_ALL)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_bitwise_those_of_keeping_everything(which, seed, transit):
    kept = of_keeping_everything(which)
    model, batch = models()[which]
    with moving(transit):
        moved = run(model, batch, some_away(seed))
        assert transit.sent == len(moved.schedules[0].settled) > 0
    assert torch.equal(kept.loss, moved.loss)
    assert all(map(torch.equal, kept.gradients, moved.gradients))


@pytest.mark.parametrize("which", [0, 1])
def test_the_predicted_peak_has_what_leaves_where_it_is(which, transit):
    model, batch = models()[which]
    with moving(transit):
        found = run(model, batch, some_away(1))
    (made,), (joint,) = found.schedules, found.joints
    largest = max(joint.storages[joint.tensors[at.tensor].storage].bytes for at in made.settled)
    tickets = 2 * 8 * len(made.settled)
    assert 0 <= found.forward_peaks[0] - made.forward_peak_bytes <= tickets
    # Where the next tensor comes to is predicted, and is no value of the graph yet.
    assert -tickets <= made.backward_peak_bytes - found.backward_peaks[0] <= largest


def test_less_is_saved_in_memory_and_the_backward_peak_falls(transit):
    stayed = of_keeping_everything(0)
    model, batch = models()[0]

    def all_away(joint):
        saved = schedule(joint, KEEP_ALL)
        return Decision(frozenset(), away=frozenset(transfer_nodes.candidates(joint, saved)))

    with moving(transit):
        moved = run(model, batch, all_away)
    assert moved.schedules[0].saved_bytes < stayed.schedules[0].saved_bytes // 4
    assert moved.backward_peaks[0] < stayed.backward_peaks[0]
    assert moved.forward_peaks[0] < stayed.forward_peaks[0]


@functools.cache
def products():
    """The graph of matrix products in a row, each of which saves what it reads; only read."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    (joint,) = run(Mean(model), (torch.randn(1024, 256),), lambda _: KEEP_ALL).joints
    return joint


class Mean(nn.Module):
    """One number of what a model returns."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


def test_a_quick_place_is_used_and_a_slow_one_only_where_nothing_else_fits():
    joint = products()
    least = search.choose(joint, 0).peak_bytes
    everything = search.choose(joint, 1 << 60).peak_bytes
    middle = (least + everything) // 2
    slow = Place(1.0, 1.0)
    assert search.choose(joint, everything, place=FREE).schedule.away_bytes == 0
    quick = search.choose(joint, middle, place=FREE)
    assert quick.schedule.away_bytes > 0
    assert quick.peak_bytes <= middle
    assert quick.seconds < search.choose(joint, middle).seconds
    assert search.choose(joint, middle, place=slow).schedule.away_bytes == 0


def test_a_place_is_used_where_computing_hides_the_transfers():
    joint = products()
    least = search.choose(joint, 0).peak_bytes
    everything = search.choose(joint, 1 << 60).peak_bytes
    middle = (least + everything) // 2
    size = 1024 * 256 * 4
    product_seconds = 2 * 1024 * 256 * 256 / 1e11
    # Both ways take longer than to compute it again, and each is over before the next is due.
    place = Place(size / (0.6 * product_seconds), size / (0.6 * product_seconds))
    assert search.choose(joint, middle, place=place).schedule.away_bytes > 0
    # A device that computes a hundred times as fast gives them no time to hide in.
    rates = Rates((("float32", 1e13),), 2e12)
    fast = Place(place.write_bytes_per_second, place.read_bytes_per_second, rates)
    assert search.choose(joint, middle, place=fast).schedule.away_bytes == 0


def test_some_are_elsewhere_and_others_computed_again_where_that_is_quicker(monkeypatch):
    monkeypatch.setattr(transfer_time, "REQUEST_SECONDS", 0.0)  # The tensors are small.
    torch.manual_seed(0)
    (joint,) = run(Transformer(4), tokens(16, 128), lambda _: KEEP_ALL).joints
    least = search.choose(joint, 0)
    full = search.choose(joint, 1 << 60)
    target = least.peak_bytes + (full.peak_bytes - least.peak_bytes) // 10
    place = Place(2.0**33, 2.0**33)
    both = search.choose(joint, target, place=place)
    assert both.peak_bytes <= target
    assert both.seconds < search.choose(joint, target).seconds
    # All that is free to compute again, and whatever else the target needs elsewhere.
    inside = [s for s in joint.droppable() if costs(joint)[joint.storages[s].op].seconds == 0.0]
    order = transfer_nodes.candidates(joint, schedule(joint, Decision(frozenset(inside))))
    seconds = [cost.seconds for cost in costs(joint)]
    for count in range(len(order) + 1):
        made = schedule(joint, Decision(frozenset(inside), away=frozenset(order[:count])))
        if made.peak_bytes <= target:
            break
    assert made.peak_bytes <= target
    assert both.seconds < transfer_time.lost_seconds(joint, made, seconds, place)
    assert both.schedule.away_bytes > 0
    assert both.recomputed_ops > sum(not joint.ops[op].view for op in made.recomputed)


def test_rates_of_a_place_are_rounded_so_that_noise_changes_no_plan():
    rates = [(0.9e9, 2.1e9), (1.1e9, 1.9e9)]
    offers = [{"write_bytes_per_second": w, "read_bytes_per_second": r} for w, r in rates]
    profiles = [
        {"flops_per_second": {"float32": flops}, "bytes_per_second": bytes_}
        for flops, bytes_ in [(1.3e11, 2.1e10), (1.4e11, 1.4e10)]
    ]
    one, other = map(Place.of, offers, profiles)
    assert one == other
    assert one == Place(2.0**30, 2.0**31, Rates((("float32", 2.0**37),), 2.0**34))
    busy = {"flops_per_second": {"bfloat16": 3e9, "float32": 3e9}, "bytes_per_second": 1e9}
    rates = (("bfloat16", 2.0**31), ("float32", 2.0**37))
    assert Place.of(offers[0], busy).rates == Rates(rates, 2.0**34)
    assert Place.of(offers[0], {}).rates == NOMINAL


def test_a_place_reaches_lower_than_computing_again():
    torch.manual_seed(0)
    rows = torch.randn(64, 16)
    (joint,) = run(Chain(12, 16), (rows,), lambda _: KEEP_ALL).joints
    least = search.choose(joint, 0)
    lower = search.choose(joint, 0, place=Place(1.0, 1.0))
    assert lower.schedule.away_bytes > 0
    assert lower.peak_bytes < least.peak_bytes


class Chain(nn.Module):
    """Layers with random numbers after each, which are drawn once and so have to be saved."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1)
        return x.square().mean()


def deep():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return memfit.Workload(
        Chain(6, 256),
        torch.randn(4096, 256),
        lambda model, batch: model(batch),
        lambda p: torch.optim.SGD(p, lr=1e-2),
    )


@pytest.fixture
def quick_disk(monkeypatch):
    rates = {"disk_write": 1e13, "disk_read": 1e13}
    monkeypatch.setattr(cost_source, "_disk", lambda _: rates)


def trained(budget, steps=4, **options):
    work = deep()
    fitted = memfit.fit(work, budget, compile=True, **options)
    assert isinstance(fitted, CompiledFitted), fitted.report().not_compiled
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        found.append(float(fitted.step()))
    return found, [p.detach().clone() for p in work.model.parameters()], fitted


@functools.cache
def trained_in_memory():
    """Losses and parameters, and a budget of less than computing again reaches."""
    found, parameters, fitted = trained("200%")
    return found, parameters, fitted.report().measured_peak_bytes // 2


@needs_compiler
@pytest.mark.usefixtures("quick_disk")
def test_a_compiled_step_keeps_its_budget_with_tensors_on_a_disk(tmp_path):
    losses, parameters, budget = trained_in_memory()
    least = tmp_path / "elsewhere"
    least.mkdir()
    found, moved, fitted = trained(budget, offload=least)
    report = fitted.report()
    assert report.graphs[0].offloaded_bytes > 0
    assert report.offloaded_tensors > 0
    assert report.offloaded_bytes_read == report.offloaded_bytes_written > 0
    assert report.corrections == 0
    told = fitted.plan.planned.predicted_peak_bytes
    assert told <= budget
    assert report.measured_peak_bytes == pytest.approx(told, rel=0.001)
    assert report.measured_peak_bytes <= budget
    assert any(action.kind == "offload" for action in fitted.plan.actions)
    assert found == pytest.approx(losses, rel=1e-5)
    for one, other in zip(parameters, moved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not list(least.iterdir())


@needs_compiler
@pytest.mark.usefixtures("quick_disk")
def test_a_failed_write_is_an_error_before_any_update(tmp_path, monkeypatch):
    _, _, budget = trained_in_memory()
    _, _, fitted = trained(budget, offload=tmp_path)
    before = [p.detach().clone() for p in fitted.workload.model.parameters()]

    def fails(_):
        raise OffloadError("the disk is full")

    tier = fitted._transit._tier
    with monkeypatch.context() as patch:
        patch.setattr(tier, "send", fails)
        with pytest.raises(OffloadError, match="disk is full"):
            fitted.step()
    assert all(map(torch.equal, before, fitted.workload.model.parameters()))
    gc.collect()
    assert not transfer_ops._AWAY
    fitted.step()


def test_a_ticket_of_another_step_is_an_error(transit):
    with moving(transit):
        ticket = torch.ops.memfit.send_away(torch.ones(8))
        ticket = torch.ops.memfit.settle(ticket, torch.ones(8))
    with pytest.raises(OffloadError, match="after its step"):
        torch.ops.memfit.fetch(ticket, [], [8], [1], torch.float32, torch.device("cpu"))
    with pytest.raises(OffloadError, match="outside its step"):
        torch.ops.memfit.send_away(torch.ones(8))
