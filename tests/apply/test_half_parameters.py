"""Parameters in bfloat16 as an action: bytes, bits, what stays whole, and when it is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rates import costs_file
from torch import nn
from torch.nn import functional

import memfit
from memfit.apply.precision import eight_bit_state
from memfit.measure import measure_peak, static_tensors
from memfit.tensors.narrow_parameters import halves, is_narrow, joined, lower_half
from memfit.weights.weightless import weightless
from memfit.workload import Workload

ALONE = ("chunk", "micro_batch")
HALF = torch.bfloat16


class Words(nn.Module):
    """An embedding, tied to the head, around linear layers with norms; `wide` has a large norm."""

    def __init__(self, width=128, *, wide=False):
        super().__init__()
        self.words = nn.Embedding(500, width)
        nn.init.normal_(self.words.weight, std=0.05)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm((32, 4 * width) if wide else 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x) + self.places[: x.shape[1]]
        return self.head(h + self.down(functional.gelu(self.norm(self.up(h)))))


class Pictures(nn.Module):
    """Convolutions with batch norms, and most of its bytes in parameters.

    What convolutions take while they run is not the same on all processors.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.second = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.head = nn.Linear(64, 1000)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def words(rows=8, optimizer=torch.optim.AdamW, **form):
    torch.manual_seed(0)
    batch = torch.randint(0, 500, (rows, 32))
    return Workload(
        Words(**form),
        batch,
        lambda model, batch: functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        optimizer,
    )


def pictures(optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    batch = (torch.randn(4, 3, 8, 8), torch.randint(0, 1000, (4,)))
    return Workload(
        Pictures(),
        batch,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer,
    )


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)


@pytest.fixture
def quick(tmp_path):
    """Op times of a machine where 16 bits pay: on some processors recomputing costs less."""
    return costs_file(tmp_path, bfloat16=4e9)


def planned(load, budget, **options):
    options.setdefault("forbid", ALONE)
    return memfit.plan(load, budget, allow="half_parameters", **options)


def kinds(plan):
    return {action.kind for action in plan.actions}


def action(plan):
    found = [it for it in plan.as_dict()["actions"] if it["kind"] == "half_parameters"]
    return found[0]["half_parameters"]["names"] if found else None


def own_gradients(load, names, *, keeps_lower):
    """Loss and gradients of one's own narrow parameters under one's own autocast."""
    named = dict(load.model.named_parameters())
    for name in names:
        # Upper halves are the nearest too; of two that are as near, the larger.
        data = named[name].data
        named[name].data = halves(data)[0] if keeps_lower else data.to(HALF)
    with torch.autocast("cpu", HALF, cache_enabled=False):
        loss = load.loss(load.model, load.batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in named.items()}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, momentum])
@pytest.mark.parametrize(
    ("build", "budget"), [(words, "60%"), (words, "least"), (pictures, "70%"), (pictures, "least")]
)
def test_a_planned_step_takes_what_is_predicted_and_computes_what_ones_own_would(
    build, budget, optimizer
):
    load = build(optimizer=optimizer)
    is_least = budget == "least"
    plan = planned(load, planned(load, "1%").minimum_budget_bytes if is_least else budget)
    assert plan.fits, plan
    assert keeps_lower(plan) is not is_least
    assert plan.promise == "approximate"
    assert {"half_parameters", "autocast", "optimizer_bits"} <= kinds(plan)
    names = action(plan)
    loss, gradients = own_gradients(build(), names, keeps_lower=not is_least)
    seen, hooks = {}, []
    for name, parameter in load.model.named_parameters():
        hook = parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({name: p.grad.clone()})
        )
        hooks.append(hook)
    with memfit.Fitted(load, plan) as fitted:
        assert torch.equal(fitted.step(), loss)
        assert seen.keys() == gradients.keys()
        assert all(torch.equal(seen[name], gradients[name]) for name in seen)
        named = dict(load.model.named_parameters())
        assert {name for name, p in named.items() if p.dtype is HALF} == set(names)
        for hook in hooks:
            hook.remove()
        peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
    assert peak == pytest.approx(plan.planned.predicted_peak_bytes, rel=1e-3)
    assert peak <= plan.budget_bytes


def keeps_lower(plan):
    (state,) = [it for it in plan.as_dict()["actions"] if it["kind"] == "optimizer_bits"]
    return state["optimizer_bits"].get("lower_halves", False)


def test_what_products_and_embeddings_read_is_narrowed_and_nothing_else():
    assert action(planned(words(), "50%")) == ["words.weight", "up.weight", "down.weight"]
    wide = action(planned(words(wide=True), "50%"))
    assert wide == ["words.weight", "up.weight", "down.weight"], "a norm is whole, however large"
    assert action(planned(pictures(), "60%")) == ["second.weight", "head.weight"]


def test_least_peak_and_bytes_a_parameter():
    """With AdamW, 16 bytes a parameter become 6.03."""
    load = words(width=512, rows=1)
    exact = memfit.plan(load, "1KiB", forbid=ALONE).minimum_peak_bytes
    assert planned(load, "1KiB").minimum_peak_bytes < 0.55 * exact
    plan = planned(load, planned(load, "1KiB").minimum_budget_bytes)
    with memfit.Fitted(load, plan) as fitted:
        fitted.step()
        gradients = [p.numel() * p.itemsize for p in load.model.parameters()]
        held = sum(t.nbytes for t in static_tensors(load, fitted.optimizer))
    numbers = sum(p.numel() for p in load.model.parameters())
    # What is small or read by sums stays whole: places and biases.
    assert (held + sum(gradients)) / numbers < 6.4


def test_ties_hooks_groups_and_a_gradient_from_before_stay():
    load = words()
    model = load.model
    optimizer = torch.optim.AdamW(
        [{"params": [model.words.weight], "lr": 1e-2}, {"params": [*model.up.parameters()]}]
    )
    load = replace(load, optimizer=optimizer)
    before = [group["params"] for group in optimizer.param_groups]
    called = []
    model.up.weight.register_hook(lambda gradient: called.append(gradient.dtype))
    load.loss(model, load.batch).backward()
    assert called == [torch.float32]
    plan = planned(load, "60%")
    with memfit.Fitted(load, plan) as fitted:
        fitted.place_state()
        assert model.up.weight.grad.dtype is HALF
        fitted.step()
        fitted.step()
        assert called == [torch.float32, HALF, HALF]
        assert model.head.weight is model.words.weight
        now = [group["params"] for group in optimizer.param_groups]
        assert [[*map(id, it)] for it in now] == [[*map(id, it)] for it in before]
        assert is_narrow(model.up.weight)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert not is_narrow(model.up.weight)


def test_closing_leaves_a_model_and_an_optimizer_that_go_on_by_themselves():
    load = words()
    optimizer = torch.optim.AdamW(load.model.parameters())
    load = replace(load, optimizer=optimizer)
    fitted = memfit.Fitted(load, planned(load, "50%"))
    for _ in range(2):
        fitted.step()
    narrow = load.model.up.weight.detach().clone()
    fitted.close()
    weight = load.model.up.weight
    assert torch.equal(weight, narrow.float()), "it is made wide, not put back"
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype is torch.float32
    assert state["step"] == 2
    load.loss(load.model, load.batch).backward()
    optimizer.step()
    assert not torch.equal(weight, narrow.float())


def test_with_lower_halves_updates_are_those_of_32_bits():
    """Beside the same plan with all of the parameters whole: off by the gradients alone."""

    def moved(plan):
        load = words()
        before = load.model.up.weight.detach().clone()
        with memfit.Fitted(load, plan) as fitted:
            for _ in range(6):
                fitted.step()
        return load.model.up.weight.detach() - before

    kept = planned(words(), "60%")
    assert keeps_lower(kept)
    rounded = planned(words(), planned(words(), "1%").minimum_budget_bytes)
    assert not keeps_lower(rounded)
    whole = moved({"actions": [it for it in kept.as_dict()["actions"] if it["kind"] == "autocast"]})
    off = [(moved(plan) - whole).norm() / whole.norm() for plan in (kept, rounded)]
    assert off[0] < 0.1
    assert off[1] > 2 * off[0]


def test_lower_halves_come_back_to_the_bit_unless_somebody_wrote():
    load = words()
    before = {name: p.detach().clone() for name, p in load.model.named_parameters()}
    plan = planned(load, "60%")
    fitted = memfit.Fitted(load, plan)
    fitted.place_state()
    up, down = load.model.up.weight, load.model.down.weight
    assert up.dtype is down.dtype is HALF
    lower = lower_half(up)
    assert lower.dtype is torch.int16
    assert lower.shape == up.shape
    with torch.no_grad():
        down.fill_(3.0)
    fitted.close()
    after = dict(load.model.named_parameters())
    assert torch.equal(down, torch.full_like(down, 3.0))
    assert all(torch.equal(after[name], before[name]) for name in after if name != "down.weight")
    assert lower_half(up) is None


@pytest.mark.parametrize("kernel", [True, False])
def test_weights_that_are_zeroed_unseen_stay_near_zero(monkeypatch, kernel):
    """A mask through `.data` changes no version: half of a number must not make another of zero."""
    monkeypatch.setattr(eight_bit_state, "has_kernel", lambda _: kernel)
    load = words()
    with memfit.Fitted(load, planned(load, "60%")) as fitted:
        for _ in range(3):
            fitted.step()
            weight = load.model.up.weight
            weight.data[:64] = 0.0
        lower = lower_half(weight)
        assert (lower[:64] < 0).any(), "what a number was off by, which is none now"
        fitted.step()
        assert weight.isfinite().all()
        weight.data[:64] = 0.0
        weight.data[64:66] = float("inf")
    assert load.model.up.weight[:64].abs().max() < 1e-39
    assert not load.model.up.weight.isnan().any()


def test_numbers_in_halves_are_put_together_to_the_bit():
    bits = torch.randint(-(2**31), 2**31 - 1, (70_000,), dtype=torch.int64).to(torch.int32)
    wide = bits.view(torch.float32)
    wide[:5] = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, float("nan")])
    wide = wide.view(70, 1000).t()
    upper, lower = halves(wide)
    again = joined(upper, lower)
    is_none = wide.isnan()
    assert torch.equal(again.isnan(), is_none)
    assert torch.equal(upper.isnan(), is_none)
    assert torch.equal(again.view(torch.int32)[~is_none], wide.view(torch.int32)[~is_none])
    nearest = wide.to(HALF)
    assert (upper == nearest).float().mean() > 0.98  # but for what is no number


def test_small_steps_are_not_lost():
    """Rounded to the nearest, a step of a thousandth never moves a bfloat16 that is one."""
    model = nn.Linear(128, 64, bias=False)
    nn.init.ones_(model.weight)
    batch = torch.ones(4, 128)
    load = Workload(
        model,
        batch,
        lambda model, batch: model(batch).sum(),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0),
    )
    plan = {
        "actions": [
            {"kind": "optimizer_bits", "optimizer_bits": {"names": ["weight"]}},
            {"kind": "half_parameters", "half_parameters": {"names": ["weight"]}},
            {"kind": "autocast", "autocast": {"dtype": "bfloat16", "cache": False}},
        ]
    }
    with memfit.Fitted(load, plan) as fitted:
        for _ in range(20):
            fitted.step()
        weight = model.weight.detach().float()
    assert weight.mean().item() == pytest.approx(1 - 20e-3, abs=5e-4)
    assert weight.unique().numel() > 2, "each number is rounded by itself"


def test_a_run_repeats_itself_and_moves_no_random_state():
    def run():
        load = words()
        plan = planned(load, "50%")
        torch.manual_seed(5)
        with memfit.Fitted(load, plan) as fitted:
            losses = [fitted.step().item() for _ in range(3)]
        return losses, torch.rand(1).item()

    torch.manual_seed(5)
    drawn = torch.rand(1).item()
    (losses, first), (again, second) = run(), run()
    assert losses == again
    assert first == second == drawn


def test_a_moment_that_somebody_keeps_is_updated_with_the_parameter():
    load = words()
    optimizer = torch.optim.AdamW(load.model.parameters())
    load = replace(load, optimizer=optimizer)
    with memfit.Fitted(load, planned(load, "50%")) as fitted:
        fitted.step()
        kept = optimizer.state[load.model.up.weight]["exp_avg"]
        before, weight = kept.clone(), load.model.up.weight.detach().clone()
        assert kept.dtype is torch.float32
        fitted.step()
        assert not torch.equal(kept, before)
        assert not torch.equal(load.model.up.weight, weight)


def test_frozen_parameters_need_no_form_of_an_optimizer(quick):
    load = words(optimizer=lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.1))
    load.model.up.requires_grad_(False)  # noqa: FBT003 - torch's own signature
    plan = planned(load, "90%", costs=quick)
    assert action(plan) == ["up.weight"]
    assert "optimizer_bits" not in kinds(plan)
    with memfit.Fitted(load, plan) as fitted:
        before = load.model.up.weight.detach().clone()
        fitted.step()
        assert load.model.up.weight.dtype is HALF
        assert torch.equal(load.model.up.weight, before.to(HALF))
        peak = measure_peak(fitted.step, static_tensors(load, fitted.optimizer)).peak_bytes
    assert peak == pytest.approx(plan.planned.predicted_peak_bytes, rel=1e-3)


def test_a_batch_of_another_shape_is_planned_from_whole_parameters():
    load = words()
    budget = int(memfit.predict(load).predicted_peak_bytes * 0.5)
    fitted = memfit.fit(load, budget, allow="half_parameters", forbid=("chunk",))
    with fitted:
        fitted.step()
        assert is_narrow(load.model.up.weight)
        assert memfit.predict(load).predicted_peak_bytes > 1.9 * budget, "of the step without plan"
        fitted.step(load.batch[:4])
        fitted.step(load.batch[:4])
        assert fitted.report().steps == 3


def test_verify_judges_it_by_its_error():
    from memfit.verify.eager import verify

    plan = planned(words(), "50%")
    found = verify(words, plan.as_dict(), steps=1)
    assert found["planned"]["measured_peak_bytes"] <= plan.budget_bytes
    assert 0 < found["approximation"]["gradient_error"] < 0.05
    assert 0 < found["approximation"]["update_error"] < 1
    assert found["divergence"] == ""


def layers() -> memfit.Workload:
    """A step of wide layers, without dropout."""
    torch.manual_seed(0)
    sizes = [nn.Linear(256, 256) for _ in range(4)]
    return memfit.Workload(
        nn.Sequential(*(module for it in sizes for module in (it, nn.GELU()))),
        torch.randn(64, 256),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def test_verify_tells_chance_from_the_rest_and_says_the_same_twice():
    from memfit.verify.eager import verify

    found = {}
    for keeps_lower in (False, True):
        plan = planned(layers(), "1B").as_dict()
        for action in plan["actions"]:
            if action["kind"] == "optimizer_bits":
                action["optimizer_bits"]["lower_halves"] = keeps_lower
        found[keeps_lower] = verify(layers, plan, steps=1)["approximation"]
        if not keeps_lower:
            again = verify(layers, plan, steps=1)["approximation"]
            assert again == found[False], "what is drawn is the same"
    by_chance, error = found[False]["rounding_spread"], found[False]["update_error"]
    assert "rounding_spread" not in found[True], "nothing is rounded"
    assert 0 < by_chance < error
    assert found[True]["update_error"] < error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"own_loop": True}, "parameters are updated by the user's own loop"),
        ({"forbid": (*ALONE, "autocast")}, "it needs `autocast`, which is forbidden"),
        ({"forbid": (*ALONE, "half_parameters")}, "forbidden by the request"),
    ],
)
def test_it_is_refused_by_a_sentence(options, reason):
    plan = planned(words(), "10%", **options)
    assert "half_parameters" not in kinds(plan)
    assert [it.reason for it in plan.refusals if it.kind == "half_parameters"] == [reason]


def test_an_optimizer_without_a_form_and_parameters_in_one_memory_are_refused():
    def reason(load):
        plan = planned(load, "10%")
        (found,) = [it.reason for it in plan.refusals if it.kind == "half_parameters"]
        return found

    assert reason(words(optimizer=torch.optim.RMSprop)).startswith("`RMSprop` has no form in 8")
    load = words()
    load.model.up.weight.data = load.model.down.weight.data.view(512, 128)
    assert "`up.weight` lies in the same memory as `down.weight`" in reason(load)
    plan = {"actions": [{"kind": "half_parameters", "half_parameters": {"names": ["up.weight"]}}]}
    with pytest.raises(memfit.UsageError, match=r"in the same memory as `down.weight`"):
        memfit.Fitted(load, plan)
    with pytest.raises(memfit.UsageError, match="malformed"):
        memfit.Fitted(words(), {"actions": [{"kind": "half_parameters"}]})
    with pytest.raises(memfit.UsageError, match="no parameter `x`"):
        memfit.Fitted(
            words(),
            {"actions": [{"kind": "half_parameters", "half_parameters": {"names": ["x"]}}]},
        )


def test_the_class_as_a_whole_takes_it_only_where_nothing_else_fits():
    load = words(width=512, rows=1)
    usual = memfit.plan(load, "80%", allow="approximate")
    assert usual.fits
    assert "half_parameters" not in kinds(usual)
    tight = memfit.plan(load, "40%", allow="approximate")
    assert tight.fits
    assert "half_parameters" in kinds(tight)


def test_what_trains_is_updated_by_memfit_or_not_narrowed(quick):
    """Torch would round to the nearest: a narrow parameter would hardly move, without a word."""
    load = words(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    plan = planned(load, "50%").as_dict()
    state = next(it for it in plan["actions"] if it["kind"] == "optimizer_bits")
    state["optimizer_bits"]["names"].remove("up.weight")
    with pytest.raises(memfit.UsageError, match=r"holds `up.weight` in bfloat16 as one that does"):
        memfit.Fitted(load, {"actions": plan["actions"]})

    load = words(optimizer=lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.1))
    load.model.up.requires_grad_(False)  # noqa: FBT003 - torch's own signature
    with memfit.Fitted(load, planned(load, "90%", costs=quick)) as fitted:
        fitted.step()
        load.model.up.requires_grad_(True)  # noqa: FBT003
        with pytest.raises(memfit.UsageError, match=r"`up.weight` in bfloat16 as one that does"):
            fitted.step()


def test_a_parameter_that_wants_a_gradient_and_gets_none_is_not_narrowed():
    class Detached(Words):
        def forward(self, x):
            h = self.words(x)
            with torch.no_grad():
                up = self.up(h)
            return self.head(h + self.down(self.norm(up)))

    load = replace(words(), model=Detached())
    plan = planned(load, "10%")
    (reason,) = [it.reason for it in plan.refusals if it.kind == "half_parameters"]
    assert "`up.weight` trains, and no gradient reaches it" in reason


def test_a_checkpoint_of_the_optimizer_is_loaded_while_parameters_are_narrow():
    load = words()
    optimizer = torch.optim.AdamW(load.model.parameters())
    load = replace(load, optimizer=optimizer)
    with memfit.Fitted(load, planned(load, "50%")) as fitted:
        fitted.step()
        saved = copy.deepcopy(optimizer.state_dict())
        fitted.step()
        optimizer.load_state_dict(saved)
        before = load.model.up.weight.detach().clone()
        fitted.step()
        assert not torch.equal(load.model.up.weight, before)
        state = optimizer.state[load.model.up.weight]
        assert state["step"] == 2
        assert state["exp_avg"].dtype is torch.float32


@pytest.mark.offloads_parameters
def test_plans_that_offload_parameters_and_that_narrow_them_follow_each_other(tmp_path):
    load = words()
    narrow = planned(load, "50%")
    others = ("remat", "offload", "fuse_optimizer", "offload_optimizer", "one_by_one")
    options = {"offload": tmp_path, "forbid": (*ALONE, *others)}
    least = memfit.plan(load, "1B", **options).minimum_budget_bytes
    away = memfit.plan(load, least, **options)
    assert "offload_parameters" in kinds(away), away
    with memfit.Fitted(load, away) as fitted:
        fitted.step()
        assert type(load.model.up.weight) is not nn.Parameter, "it is elsewhere"
        fitted.follow(narrow)
        fitted.step()
        assert is_narrow(load.model.up.weight)
        fitted.follow(away)
        assert fitted.step().isfinite()
        assert load.model.up.weight.dtype is torch.float32


def test_a_model_without_weights_is_planned_as_one_with_them():
    plain = memfit.plan(words(), "4KiB", allow="half_parameters", forbid=ALONE)
    with weightless():
        absent = memfit.plan(words(), "4KiB", allow="half_parameters", forbid=ALONE)
    assert "half_parameters" in [action.kind for action in absent.actions]
    assert absent.minimum_peak_bytes == plain.minimum_peak_bytes
