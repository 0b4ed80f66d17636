"""Optimizer state elsewhere: the same bits, the predicted peak, nothing lost where it fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_offload import _overwrite_stored_files
from test_optimizer_in_backward import OPTIMIZERS, CountsInItsGroup
from test_pinned import LateCopies, Tier
from threads import in_threads
from torch import nn

import memfit
from memfit import _native
from memfit.apply.offload.state_view import AwayState
from memfit.apply.offload.tiers import DiskTier
from memfit.errors import OffloadError, UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.run.step_backup import BeforeStep, Buffers
from memfit.track import cpu
from memfit.verify.eager import verify
from memfit.workload import Workload

WIDTH = 64
KNOWN = {name: make for name, make in OPTIMIZERS.items() if make is not CountsInItsGroup}
NOTHING = {"actions": []}


def build(make=KNOWN["adam_amsgrad"], **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    return Workload(model, torch.randn(9, WIDTH), square, make, **options)


def square(model, batch):
    return model(batch).pow(2).mean()


def directions(window_bytes=0, least_bytes=16, names=None, **more):
    order = [n for n, _ in build().model.named_parameters()][::-1] if names is None else names
    return {
        "tier": "disk",
        "window_bytes": window_bytes,
        "least_bytes": least_bytes,
        "order": order,
        **more,
    }


def plan(*, fuse=False, **more):
    state = {"kind": "offload_optimizer", "offload_optimizer": directions(**more)}
    kinds = [{"kind": "fuse_optimizer"}] if fuse else []
    return {"actions": [{**action, "promise": "exact"} for action in [*kinds, state]]}


@pytest.fixture(autouse=True)
def _any_folder(monkeypatch):
    """Tests may write to a folder in memory."""

    def tier(window_bytes, folder=""):
        return DiskTier(window_bytes, folder, allow_memory=True)

    monkeypatch.setattr("memfit.apply.offload.tiers.DiskTier", tier)


def ordinary(steps, make=KNOWN["adam_amsgrad"], **options):
    """Losses, parameters and state after so many steps without a plan."""
    workload = build(make, **options)
    fitted = Fitted(workload, NOTHING)
    losses = [fitted.step() for _ in range(steps)]
    return losses, list(workload.model.parameters()), fitted.optimizer.state_dict()


def same(first, second):
    """Whether two nests of values hold the same bits."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(v, second[k]) for k, v in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def at_home(fitted):
    """Bytes of state in memory, tiny ones left out."""
    states = fitted.optimizer.state.values()
    there = [v for s in states for v in (s.in_memory() if isinstance(s, AwayState) else s).values()]
    return sum(v.nbytes for v in there if isinstance(v, torch.Tensor) and v.nbytes > 8)


# The same bits


@pytest.mark.parametrize(("fuse", "window_bytes"), [(False, 40_000), (True, 0), (True, 10**6)])
@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN.keys())
def test_parameters_and_state_are_bitwise_after_three_steps(make, fuse, window_bytes):
    losses, parameters, state = ordinary(3, make)
    workload = build(make)
    with Fitted(workload, plan(fuse=fuse, window_bytes=window_bytes)) as fitted:
        got = [fitted.step() for _ in range(3)]
        away = at_home(fitted)
        kept = fitted.optimizer.state_dict()
        assert fitted.report().offloaded_bytes_read > 0
    assert away == 0
    assert same(losses, got)
    assert same(parameters, list(workload.model.parameters()))
    assert same(state, kept)
    assert same(state, fitted.optimizer.state_dict())
    assert not any(isinstance(s, AwayState) for s in fitted.optimizer.state.values())


def test_small_state_and_what_the_plan_does_not_name_come_and_go_too():
    losses, parameters, state = ordinary(3)
    workload = build()
    with Fitted(workload, plan(least_bytes=4 * WIDTH + 1, names=["1.0.weight"])) as fitted:
        got = [fitted.step() for _ in range(3)]
        assert at_home(fitted) == 4 * 3 * 4 * WIDTH  # what four biases keep
        assert same(state, fitted.optimizer.state_dict())
    assert same((losses, parameters), (got, list(workload.model.parameters())))


def test_clipping_schedulers_groups_and_step_hooks_see_one_step():
    results = []
    for made in (NOTHING, plan()):
        workload = build(clip_grad_norm=0.01)
        first, others = workload.model[:1].parameters(), workload.model[1:].parameters()
        groups = [{"params": first, "lr": 0.5}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        steps = []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        with Fitted(replace(workload, optimizer=optimizer), made) as fitted:
            for _ in range(3):
                fitted.step()
                scheduler.step()
        assert len(steps) == 3
        rates = torch.tensor(scheduler.get_last_lr())
        results.append([*workload.model.parameters(), rates, optimizer.state_dict()])
    assert same(*results)


def test_a_parameter_without_a_gradient_keeps_its_state_untouched():
    results = []
    for made in (NOTHING, plan(window_bytes=10**6), plan(window_bytes=10**6, fuse=True)):
        workload = build()
        with Fitted(workload, made) as fitted:
            fitted.step()
            skipped = replace(workload, optimizer=fitted.optimizer, loss=skips_one)
            fitted.workload = skipped
            fitted.step()
            fitted.workload = workload
            fitted.step()
            results.append(copy.deepcopy(fitted.optimizer.state_dict()))
        results[-1]["parameters"] = list(workload.model.parameters())
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def skips_one(model, batch):
    return model[3](model[1](model[0](batch))).pow(2).mean()


def test_pieces_of_the_batch_update_once():
    pieces = {"kind": "micro_batch", "promise": "equivalent", "count": 3}
    results = []
    for actions in ([pieces], [pieces, *plan(window_bytes=10**6)["actions"]]):
        workload = build()
        with Fitted(workload, {"actions": actions}, loss_reduction="mean") as fitted:
            results.append([fitted.step(), fitted.step(), *workload.model.parameters()])
    assert same(*results)


# What others see of the state


def test_whoever_reads_the_state_gets_it_and_what_is_written_counts():
    results = []
    for made in (NOTHING, plan(window_bytes=10**6)):
        workload = build()
        with Fitted(workload, made) as fitted:
            fitted.step()
            weight = workload.model[1][0].weight
            state = fitted.optimizer.state[weight]
            state["exp_avg"].zero_()
            state.update(exp_avg_sq=torch.ones_like(weight))
            assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
            assert state.get("nothing", 1) == 1
            assert same(dict(state), {**state})
            fitted.step()
            results.append([*workload.model.parameters(), fitted.optimizer.state_dict()])
    assert same(*results)


SEEN = {
    "itself": lambda tensor: tensor,
    "view": lambda tensor: tensor.view(-1),
    "numpy": lambda tensor: tensor.numpy(),
    "dlpack": np.from_dlpack,
    "storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("fuse", [True, False])
def test_what_somebody_keeps_of_the_state_is_the_state(kind, fuse):
    results = []
    for made in (NOTHING, plan(fuse=fuse, window_bytes=1 << 20)):
        workload = build()
        with Fitted(workload, made) as fitted:
            fitted.step()
            states = [fitted.optimizer.state[p] for p in workload.model.parameters() if p.ndim > 1]
            seen = [SEEN[kind](state["exp_avg"]) for state in states]
            fitted.step()
            for one in seen:
                if kind == "storage":
                    one.fill_(0)
                else:
                    one[...] = 0
            fitted.step()
            del seen, states, one
            fitted.step()
            if made is not NOTHING:
                assert at_home(fitted) == 0
            results.append(copy.deepcopy(fitted.optimizer.state_dict()))
    assert same(*results)


def test_state_that_is_looked_at_in_inference_mode_can_be_written_later():
    workload = build()
    with Fitted(workload, plan()) as fitted:
        fitted.step()
        with torch.inference_mode():
            kept = fitted.optimizer.state_dict()["state"]
        tensors = [value for of in kept.values() for value in of.values()]
        assert not any(value.is_inference() for value in tensors)
        for value in tensors:
            value.mul_(1)
        fitted.step()


def test_threads_read_the_state_between_steps():
    workload = build()

    def read():
        states = [fitted.optimizer.state[p] for p in workload.model.parameters()]
        return [value.clone() for state in states for value in state.values()]

    with Fitted(workload, plan()) as fitted:
        for _ in range(5):
            fitted.step()
            results = in_threads(4, read)
            expected = read()
            assert all(same(expected, result) for result in results)


def test_copies_pickles_and_state_dicts_are_plain_and_leave_the_state_where_it_is():
    *_, state = ordinary(1)
    with Fitted(build(), plan()) as fitted:
        fitted.step()
        optimizer = fitted.optimizer
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        copies = [
            torch.load(saved, weights_only=True),
            copy.deepcopy(optimizer.state_dict()),
            pickle.loads(pickle.dumps(optimizer)).state_dict(),  # noqa: S301 - its own
            copy.deepcopy(optimizer).state_dict(),
        ]
        one = next(iter(optimizer.state.values()))
        others = [copy.copy(one), one.copy(), one | {}, {} | one]
        assert at_home(fitted) == 0
        assert "<offloaded>" in repr(one)
        with memfit.track() as tracked:
            optimizer.zero_grad()
        assert at_home(fitted) == 0, "who counts bytes only looks"
        del tracked
    assert all(same(state, other) for other in copies)
    assert all(type(other) is dict and same(dict(one), other) for other in others)
    assert all(type(s) is dict for other in copies for s in other["state"].values())


def test_a_loaded_state_is_the_one_that_goes_on():
    losses, parameters, state = ordinary(3)
    _, after_one, first = ordinary(1)
    workload = build()
    with Fitted(workload, plan()) as fitted:
        fitted.step()
        fitted.step()
        with torch.no_grad():
            for mine, theirs in zip(workload.model.parameters(), after_one, strict=True):
                mine.copy_(theirs)
        fitted.optimizer.load_state_dict(first)
        del first  # whose tensors the optimizer takes over as they are
        assert same(losses[1:], [fitted.step(), fitted.step()])
        assert at_home(fitted) == 0
        assert same(state, fitted.optimizer.state_dict())
    assert same(parameters, list(workload.model.parameters()))


@pytest.mark.parametrize("seen", [False, True])
def test_a_state_that_a_checkpoint_holds_as_well_waits_in_mapped_files(seen):
    assert cpu.start() is None

    def wide():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        return Workload(model, torch.randn(9, 256), square, KNOWN["adam_amsgrad"])

    def resumed(made):
        with Fitted(wide(), NOTHING) as before:
            before.step()
            checkpoint = before.optimizer.state_dict()
        workload = wide()
        with Fitted(workload, made) as fitted:
            fitted.optimizer.load_state_dict(checkpoint)
            held = [v for s in checkpoint["state"].values() for v in s.values() if v.ndim > 1]
            views = [it.view(-1) for it in held if seen]
            for _ in range(3):
                fitted.step()
            counted = [_native.is_counted(it.data_ptr()) for it in held]
            fitted.step()
            held[0].zero_()
            array = held[1].numpy()
            fitted.step()
            assert (array == held[1].numpy()).all(), "an array sees what is written"
            sums = [view.sum() for view in views]
            return counted, sums, copy.deepcopy(checkpoint), list(workload.model.parameters())

    names = [f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    is_there, *plainly = resumed(NOTHING)
    counted, *offloaded = resumed(plan(names=names, window_bytes=1 << 20))
    assert same(plainly, offloaded)
    assert all(is_there)
    assert all(counted) if seen else not any(counted)


def test_a_state_there_before_goes_when_the_next_step_begins():
    _, parameters, state = ordinary(3)
    workload = build()
    plain = Fitted(workload, NOTHING)
    plain.step()
    with Fitted(replace(workload, optimizer=plain.optimizer), plan(fuse=True)) as fitted:
        assert at_home(fitted) > 0
        fitted.place_state()
        assert at_home(fitted) == 0
        fitted.step()
        plain.step()  # two of them, with one optimizer
        assert at_home(fitted) > 0
    assert same(
        (parameters, state), (list(workload.model.parameters()), plain.optimizer.state_dict())
    )


def test_a_step_may_follow_plan_after_plan():
    losses, parameters, state = ordinary(4)
    workload = build()
    with Fitted(workload, plan()) as fitted:
        got = [fitted.step()]
        wide, large_only = plan(fuse=True, window_bytes=40_000), plan(least_bytes=4 * WIDTH + 1)
        for made, all_away in ((NOTHING, False), (wide, True), (large_only, False)):
            fitted.follow(made)
            got.append(fitted.step())
            assert (at_home(fitted) == 0) == all_away
        assert len(fitted.optimizer._optimizer_state_dict_post_hooks) == 1
    assert not fitted.optimizer._optimizer_state_dict_post_hooks
    assert same((losses, parameters), (got, list(workload.model.parameters())))
    assert same(state, fitted.optimizer.state_dict())


def test_a_step_that_is_put_back_leaves_the_state_where_it_is():
    *_, state = ordinary(1)
    workload = build()
    with Fitted(workload, plan()) as fitted:
        fitted.step()
        before = BeforeStep(Buffers(workload.model), workload.model, fitted.optimizer)
        assert before.restore(has_begun=False) == ""
        assert at_home(fitted) == 0
        assert same(state, fitted.optimizer.state_dict())
        fitted.step()
        assert "parameters were updated" in before.restore(has_begun=True)


def test_state_that_nobody_brought_home_is_there_all_the_same():
    *_, state = ordinary(2)
    fitted = Fitted(build(), plan())
    fitted.step()
    fitted.step()
    optimizer = fitted.optimizer
    del fitted
    gc.collect()
    assert same(state, optimizer.state_dict())


# How much is there


@pytest.mark.parametrize(
    ("name", "fuse", "wide"),
    [
        ("adam_amsgrad", False, False),
        ("adam_amsgrad", True, True),
        ("sgd_momentum", True, False),
        ("adamw_foreach", False, True),
    ],
)
def test_the_measured_peak_is_the_predicted_one(tmp_path, name, fuse, wide):
    workload = build(KNOWN[name])
    others = ["remat", "offload", "offload_parameters", "micro_batch", "chunk"]
    forbid = [*others, *([] if fuse else ["fuse_optimizer"])]
    trace = memfit.trace(workload)
    least = memfit.plan(trace, "1B", forbid=forbid, offload=tmp_path).as_dict()
    budget = least["minimum_peak_bytes"] + least["margin_bytes"]
    # One state ahead and one on its way out, besides the one in use.
    states = {"adam_amsgrad": 3, "sgd_momentum": 1, "adamw_foreach": 2}[name]
    budget += wide * 2 * states * 4 * WIDTH * WIDTH
    made = memfit.plan(trace, budget, forbid=forbid, offload=tmp_path).as_dict()
    kinds = {action["kind"]: action for action in made["actions"]}
    assert (kinds["offload_optimizer"]["offload_optimizer"]["window_bytes"] > 0) == wide
    assert ("fuse_optimizer" in kinds) == fuse
    with Fitted(workload, made) as fitted:
        fitted.step()
        static = static_tensors(workload, fitted.optimizer)
        measured = measure_peak(fitted.step, static)
    # The numbers that autograd keeps as tensors are not predicted.
    assert 0 <= measured.peak_bytes - made["planned"]["predicted_peak_bytes"] <= 16
    assert measured.left_bytes == 0
    assert measured.peak_bytes <= made["budget_bytes"]


def test_the_first_step_makes_the_state_and_stays_within_the_prediction(tmp_path):
    workload = build()
    forbid = ["remat", "offload_parameters", "micro_batch", "chunk"]
    trace = memfit.trace(workload)
    least = memfit.plan(trace, "1B", forbid=forbid, offload=tmp_path).as_dict()
    budget = least["minimum_peak_bytes"] + least["margin_bytes"]
    made = memfit.plan(trace, budget, forbid=forbid, offload=tmp_path).as_dict()
    with Fitted(workload, made) as fitted:
        static = static_tensors(workload, fitted.optimizer)
        measured = measure_peak(fitted.step, static)
    assert measured.peak_bytes <= made["budget_bytes"]


def test_verify_agrees(tmp_path):
    forbid = ["remat", "offload", "offload_parameters", "micro_batch", "chunk"]
    trace = memfit.trace(build())
    least = memfit.plan(trace, "1B", forbid=forbid, offload=tmp_path).as_dict()
    budget = least["minimum_peak_bytes"] + least["margin_bytes"]
    made = memfit.plan(trace, budget, forbid=forbid, offload=tmp_path).as_dict()
    assert made["verdict"] == "fits"
    outcome = verify(build, made, loss_reduction="mean")
    kinds = {outcome[part]["agreement"] for part in ("loss", "gradients", "parameters", "buffers")}
    assert kinds == {"bitwise"}
    assert outcome["planned"]["measured_peak_bytes"] <= made["budget_bytes"]
    assert outcome["unplanned"]["measured_peak_bytes"] > made["budget_bytes"]


@pytest.mark.parametrize("window_bytes", [0, 40_000])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_gpus_state_is_let_go_only_once_it_was_copied(fuse, window_bytes):
    losses, parameters, state = ordinary(3)
    workload = build()
    fitted = Fitted(workload, plan(fuse=fuse, window_bytes=window_bytes))
    copies = LateCopies()
    fitted._running.state.tier = Tier(copies)
    got = [fitted.step() for _ in range(3)]
    # The host's memory is used again from step to step.
    assert copies.pinned_bytes == sum(3 * p.nbytes for p in parameters)
    fitted.close()
    assert same((losses, parameters), (got, list(workload.model.parameters())))
    assert same(state, fitted.optimizer.state_dict())


# Failures


class FailsOnce(DiskTier):
    """A disk that fails, or is interrupted, the `at`-th time that it does something."""

    def __init__(self, folder, what, at, error=OffloadError):
        super().__init__(1 << 20, folder, allow_memory=True)
        self.what, self.left, self.error = what, at, error

    def send(self, source):
        return FailingParcel(self, super().send(source))


class FailingParcel:
    def __init__(self, tier, parcel):
        self.tier, self.parcel = tier, parcel

    def __getattr__(self, name):
        if name == self.tier.what:
            self.tier.left -= 1
            if self.tier.left == 0:
                raise self.tier.error("no space")
        return getattr(self.parcel, name)


def with_tier(tier, window_bytes, *, fuse=False):
    workload = build()
    fitted = Fitted(workload, plan(fuse=fuse, window_bytes=window_bytes))
    fitted._running.state.tier = tier
    return workload, fitted


@pytest.mark.parametrize(
    ("at", "window_bytes", "fuse"), [(1, 0, False), (1, 10**6, True), (30, 0, True)]
)
def test_a_write_that_fails_costs_memory_and_the_next_step_says_so(
    tmp_path, at, window_bytes, fuse
):
    losses, parameters, state = ordinary(3)
    tier = FailsOnce(tmp_path, "settle", at)
    workload, fitted = with_tier(tier, window_bytes, fuse=fuse)
    got = [fitted.step()]
    if at == 30:
        got.append(fitted.step())  # 24 tensors go in each
    assert at_home(fitted) > 0
    assert same(losses[: len(got)], got)
    before = [p.clone() for p in workload.model.parameters()]
    tier.left = 1
    with pytest.raises(OffloadError, match=r"no space; .* unchanged, and no step has begun"):
        fitted.step()
    assert same(before, list(workload.model.parameters()))
    got += [fitted.step() for _ in range(3 - len(got))]  # the disk works again
    assert at_home(fitted) == 0
    fitted.close()
    assert same((losses, parameters), (got, list(workload.model.parameters())))
    assert same(state, fitted.optimizer.state_dict())


def test_a_disk_that_refuses_to_take_any_leaves_a_model_that_can_be_saved(tmp_path, monkeypatch):
    _, parameters, state = ordinary(1)
    workload, fitted = with_tier(DiskTier(0, tmp_path, allow_memory=True), 0)

    def full(_source):
        raise OffloadError("no space")

    monkeypatch.setattr(fitted._running.state.tier, "send", full)
    fitted.step()
    for _ in range(2):
        with pytest.raises(OffloadError, match="unchanged, and no step has begun"):
            fitted.step()
    assert same(
        (parameters, state), (list(workload.model.parameters()), fitted.optimizer.state_dict())
    )
    fitted.close()
    assert same(state, fitted.optimizer.state_dict())


def test_state_that_does_not_come_back_is_named_before_its_parameter_is_updated(tmp_path):
    workload, fitted = with_tier(DiskTier(0, tmp_path, allow_memory=True), 0)
    fitted.step()
    before = [p.clone() for p in workload.model.parameters()]
    _overwrite_stored_files()
    with pytest.raises(
        OffloadError, match=r"(?s)shape \[64\] is lost.*came back changed.*checkpoint"
    ):
        fitted.step()
    assert same(before, list(workload.model.parameters()))
    assert all(p.grad is None for p in workload.model.parameters())
    with pytest.raises(OffloadError, match="came back changed"):
        fitted.close()


@pytest.mark.parametrize(
    ("fails", "window_bytes", "fuse"),
    [
        ("settle", 0, False),
        ("settle", 10**6, True),
        ("fetch", 0, True),
        ("wait", 10**6, False),
        ("wait", 40_000, True),
    ],
)
def test_ctrl_c_loses_no_state(tmp_path, fails, window_bytes, fuse):
    first = 24 if fails == "settle" else 0  # tensors that went out in the first step
    tier = FailsOnce(tmp_path, fails, first + 8, error=KeyboardInterrupt)
    workload, fitted = with_tier(tier, window_bytes, fuse=fuse)
    fitted.step()
    interrupted = 0
    for _ in range(2):
        try:
            fitted.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 1
    # Each parameter was updated with its state or not at all: it goes on as an ordinary step would.
    twin = build()
    twin.model.load_state_dict(workload.model.state_dict())
    plain = Fitted(twin, NOTHING)
    plain.optimizer.load_state_dict(copy.deepcopy(fitted.optimizer.state_dict()))
    assert same(plain.step(), fitted.step())
    assert same(plain.optimizer.state_dict(), fitted.optimizer.state_dict())
    assert same(list(twin.model.parameters()), list(workload.model.parameters()))
    fitted.close()
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_left_and_none_stays_open_when_it_is_closed(tmp_path):
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with Fitted(build(), plan(), offload_dir=tmp_path) as fitted:
        fitted.step()
        assert list(tmp_path.iterdir()) == []
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors + 1
        optimizer = fitted.optimizer
    del fitted
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert not optimizer._optimizer_state_dict_post_hooks


# What is refused


def test_an_optimizer_that_does_not_update_each_parameter_on_its_own_is_refused_by_name(tmp_path):
    for make in (torch.optim.LBFGS, torch.optim.Rprop, CountsInItsGroup):
        with pytest.raises(
            UsageError, match=f"optimizer state, but `{make.__name__}` is not known"
        ):
            Fitted(build(make), plan())
    workload = build(torch.optim.LBFGS)
    refusals = memfit.plan(memfit.trace(build(CountsInItsGroup)), "1B", offload=tmp_path).as_dict()
    reasons = {refusal["kind"]: refusal["reason"] for refusal in refusals["refusals"]}
    assert "`CountsInItsGroup` is not known" in reasons["offload_optimizer"]
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="`offload_optimizer` forbidden"):
        Fitted(replace(workload, optimizer=optimizer), plan())


def test_an_own_loop_and_plans_that_make_no_sense_are_refused(tmp_path):
    refused = pytest.raises(UsageError, match=r"needs `Fitted\.step`")
    with Fitted(build(), plan()) as fitted, refused, fitted.forward():
        pass
    made = memfit.plan(memfit.trace(build()), "1B", own_loop=True, offload=tmp_path).as_dict()
    reasons = {refusal["kind"]: refusal["reason"] for refusal in made["refusals"]}
    assert reasons["offload_optimizer"] == "the optimizer is called by the user's own loop"
    with pytest.raises(UsageError, match="malformed"):
        Fitted(build(), plan(window_bytes=None))
    with pytest.raises(UsageError, match="offloads to `tape`"):
        Fitted(build(), plan(tier="tape"))
    missing = tmp_path / "missing"
    with contextlib.suppress(FileNotFoundError), pytest.raises(OffloadError, match="missing`"):
        Fitted(build(), plan(), offload_dir=missing)
