"""Weights of an inference in fewer bits: bytes, bits, what comes back, and when it is refused."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.plan import alternatives
from memfit.tensors.barrier import Barrier
from memfit.weights.weightless import weightless
from memfit.workload import Workload

ALONE = ("chunk", "micro_batch")


class Words(nn.Module):
    """An embedding around linear layers, with a head of its own or the embedding's."""

    def __init__(self, width=128, *, tied=False):
        super().__init__()
        self.words = nn.Embedding(100, width)
        layers = (nn.Linear(width, width) for _ in range(16))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x)
        for layer in self.layers:
            h = h + functional.gelu(layer(self.norm(h)))
        return self.head(h)


def words(rows=4, **form):
    torch.manual_seed(0)
    return Workload(Words(**form).eval(), torch.randint(0, 100, (rows, 16)))


def planned(workload, *kinds, budget="1KiB", **keywords):
    keywords.setdefault("forbid", ALONE)
    return memfit.plan(workload, budget, allow=kinds, **keywords)


@cache
def plan_of(build, *kinds):
    plan = planned(build(), *kinds, budget="75%")
    assert plan.fits
    return plan


def fitted(build, *kinds):
    """A workload by a plan of these kinds."""
    return memfit.Fitted(build(), plan_of(build, *kinds))


def least(plan):
    """A budget that the plan of the least bytes fits, with its margin."""
    return int(1.02 * plan.minimum_peak_bytes)


def measured(one):
    one.step()
    return measure_peak(one.step, static_tensors(one.workload, None)).peak_bytes


def kinds_of(plan):
    return [action.kind for action in plan.actions]


def refusal_of(plan, kind):
    return next(it.reason for it in plan.refusals if it.kind == kind)


def tied():
    return words(tied=True)


FLOAT16 = ("half_parameters", "autocast_fp16")
CASES = [
    (words, "half_parameters"),
    (words, *FLOAT16),
    (words, "int8_weights"),
    (tied, "int8_weights"),
]


@pytest.mark.parametrize(("build", "kinds"), [(build, kinds) for build, *kinds in CASES])
def test_bytes_are_predicted(build, kinds):
    if "int8_weights" in kinds:
        pytest.importorskip("torchao")
    one = fitted(build, *kinds)
    assert set(kinds) <= set(kinds_of(one.plan))
    peak = measured(one)
    assert one.plan.planned.predicted_peak_bytes == peak
    assert peak < 0.6 * one.plan.unplanned.predicted_peak_bytes


TYPES = [(torch.bfloat16, ["half_parameters"]), (torch.float16, FLOAT16)]


@pytest.mark.parametrize(("dtype", "kinds"), TYPES)
def test_outputs_in_16_bits_are_those_of_ones_own_narrow_weights(dtype, kinds):
    own = copy.deepcopy(words().model)
    for name, parameter in own.named_parameters():
        if name.endswith("weight") and name != "norm.weight":
            parameter.data = parameter.data.to(dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype, cache_enabled=False):
        expected = own(words().batch)
    one = fitted(words, *kinds)
    workload = one.workload
    assert torch.equal(one.step(), expected)
    one.close()
    for name, parameter in workload.model.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, own.get_parameter(name).float())


def test_float16_is_nearer_and_takes_no_more():
    half, float16 = (fitted(words, *kinds) for _, kinds in TYPES)
    peaks = [one.plan.planned.predicted_peak_bytes for one in (half, float16)]
    assert [measured(one) for one in (half, float16)] == peaks
    # A processor that multiplies bfloat16 alone, in tiles or not, packs matrices of float16 first.
    assert peaks[1] <= peaks[0] or torch.cpu._is_avx512_bf16_supported()
    with torch.no_grad():
        exact = words().model(words().batch)
    errors = [float((one.step().float() - exact).norm()) for one in (half, float16)]
    assert errors[1] < errors[0] / 4, errors
    assert any("float16 ends at 65504" in note for note in float16.plan.notes)


def test_weights_beyond_float16_stay():
    far = words()
    with torch.no_grad():
        far.model.layers[3].weight[5, 7] = -1e5
    reason = refusal_of(planned(far, *FLOAT16), "half_parameters")
    assert reason == "`layers.3.weight` holds a number of 1e+05, and float16 ends at 65504"
    with pytest.raises(memfit.UsageError, match=r"in 16 bits, but `layers.3.weight` holds"):
        memfit.Fitted(far, plan_of(words, *FLOAT16))
    assert "half_parameters" in kinds_of(planned(far, "half_parameters"))


def test_verify_says_no_where_activations_leave_float16():
    def far():
        workload = words()
        with torch.no_grad():
            workload.model.norm.weight.mul_(1e6)
        return workload

    found = memfit.verify(far, plan=plan_of(words, *FLOAT16), steps=1)
    assert not found.holds
    assert memfit.verify(far, plan=plan_of(words, "half_parameters"), steps=1).holds


def test_another_type_of_16_bits_begins_with_the_whole_weights():
    workload = words()
    plans = [plan_of(words, *kinds) for _, kinds in TYPES]
    one = memfit.Fitted(workload, plans[1])
    first = one.step()
    one.follow(plans[0])
    one.step()
    assert workload.model.head.weight.dtype is torch.bfloat16
    one.follow(plans[1])
    assert torch.allclose(one.step().float(), first.float(), atol=5e-2)
    assert workload.model.head.weight.dtype is torch.float16
    one.close()
    assert workload.model.head.weight.dtype is torch.float32


def test_outputs_in_8_bits_are_those_of_torchao():
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    own = copy.deepcopy(words().model)
    quantize_(own, Int8WeightOnlyConfig(set_inductor_config=False))
    with torch.no_grad():
        expected = own(words().batch)
    one = fitted(words, "int8_weights")
    workload = one.workload
    before = dict(workload.model.named_parameters())
    assert torch.equal(one.step(), expected)
    kept = before["layers.3.weight"]
    assert kept.shape == (128, 128)
    assert kept.dtype is torch.float32
    with pytest.raises(memfit.UsageError, match="is held in 8 bits by a plan"):
        kept.sum()
    one.close()
    after = dict(workload.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert torch.equal(after["layers.3.weight"], own.layers[3].weight.dequantize())
    assert torch.equal(after["layers.3.bias"], own.layers[3].bias)
    with torch.no_grad():
        assert torch.allclose(workload.model(workload.batch), expected, atol=1e-5)


def test_an_interrupt_while_weights_are_quantised_loses_none(monkeypatch):
    pytest.importorskip("torchao")
    one = fitted(words, "int8_weights")
    model = one.workload.model
    own = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in own.items()}
    put_up, calls = Barrier.put_up, []

    def interrupted(barrier):
        calls.append(barrier)
        if len(calls) == 3:
            raise KeyboardInterrupt
        put_up(barrier)

    with monkeypatch.context() as patched:
        patched.setattr(Barrier, "put_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.step()
    result = one.step()
    assert torch.equal(result, fitted(words, "int8_weights").step())
    one.close()
    for name, parameter in model.named_parameters():
        assert parameter is own[name]
        assert torch.allclose(parameter, values[name], atol=1e-2), name


def test_what_an_embedding_has_too_is_not_quantised():
    pytest.importorskip("torchao")
    one = fitted(tied, "int8_weights")
    one.step()
    workload = one.workload
    assert type(workload.model.head.weight) is nn.Parameter
    assert workload.model.head.weight is workload.model.words.weight
    assert next(it.count for it in one.plan.actions if it.kind == "int8_weights") == 16


@pytest.mark.parametrize("kind", ["half_parameters", "int8_weights"])
def test_a_loop_of_ones_own_infers_with_them(kind):
    if kind == "int8_weights":
        pytest.importorskip("torchao")
    expected = fitted(words, kind).step()
    one = memfit.Fitted(words(), planned(words(), kind, budget="75%", own_loop=True))
    assert kind in kinds_of(one.plan)
    for _ in range(2):
        with one.forward():
            found = one.workload.model(one.workload.batch)
        assert torch.equal(found, expected)
    one.close()


def test_another_plan_puts_weights_back():
    pytest.importorskip("torchao")
    one = fitted(words, "int8_weights")
    workload = one.workload
    own = workload.model.layers[3].weight
    one.step()
    assert workload.model.layers[3].weight is not own
    again = memfit.plan(workload, "200%")
    assert again.unplanned == plan_of(words, "int8_weights").unplanned
    one.follow(again)
    one.step()
    assert workload.model.layers[3].weight is own
    one.close()


def test_bfloat16_comes_before_8_bits():
    pytest.importorskip("torchao")
    workload = words()
    half = least(planned(workload, "half_parameters"))
    eight = least(planned(workload, "int8_weights"))
    assert eight < half
    for budget, kind in ((half, "half_parameters"), (eight, "int8_weights")):
        plan = memfit.plan(workload, budget, allow="approximate", forbid=ALONE)
        assert plan.fits
        assert kind in kinds_of(plan)
    exact = memfit.plan(workload, "200%", allow="approximate")
    assert exact.actions == ()


def test_verify_says_how_far_outputs_are_off():
    plan = plan_of(words, "half_parameters")
    found = memfit.verify(words, plan=plan, steps=1)
    assert found.holds
    outputs = found.outputs
    assert outputs is not None
    assert outputs.rows == 64
    assert 0 < outputs.error < 0.02
    assert outputs.cosine > 0.999
    assert "outputs  off by" in str(found)
    strict = memfit.verify(words, plan=plan, steps=1, max_error=1e-6)
    assert not strict.holds
    assert "but outputs are not what" in str(strict)


@pytest.mark.parametrize("kind", ["half_parameters", "int8_weights"])
def test_a_model_without_weights_is_planned_as_one_with_them(kind):
    if kind == "int8_weights":
        pytest.importorskip("torchao")
    with weightless():
        absent = planned(words(), kind, budget="75%")
    assert kind in kinds_of(absent)
    assert absent.planned.predicted_peak_bytes == plan_of(words, kind).planned.predicted_peak_bytes


def test_what_leave_would_narrow_is_said_where_nothing_fits():
    exact = memfit.plan(words(), "50%", forbid=ALONE)
    note = next(note for note in exact.notes if note.startswith("`--allow "))
    assert "`--allow half_parameters` would hold 1.1 MiB of weights in half of that" in note
    assert "`--allow int8_weights` would hold those of `nn.Linear`, up to 1.0 MiB, in a" in note
    eight = planned(words(), "int8_weights")
    assert not any("int8_weights" in note for note in eight.notes)
    standing = next(note for note in eight.notes if "alive throughout" in note)
    assert standing.startswith("parameter ")
    assert "KiB" in standing.partition(" + ")[0], standing  # in 8 bits, not 1.2 MiB


def test_what_trains_is_not_quantised():
    def loss(model, batch):
        return model(batch).square().mean()

    workload = Workload(words().model, words().batch, loss, torch.optim.SGD)
    reason = refusal_of(planned(workload, "int8_weights"), "int8_weights")
    assert reason == "the step trains, and weights in 8 bits cannot"


def test_refusals_are_sentences(monkeypatch):
    pictures = Workload(nn.Conv2d(3, 64, 3).eval(), torch.randn(2, 3, 16, 16))
    reason = refusal_of(planned(pictures, "int8_weights"), "int8_weights")
    assert reason == "no linear layer has a large weight in float32 of its own"

    def missing():
        raise memfit.UsageError("torchao, which quantises, is not installed\nhint: install it")

    monkeypatch.setattr(alternatives, "require_torchao", missing)
    reason = refusal_of(planned(words(), "int8_weights"), "int8_weights")
    assert reason == "torchao, which quantises, is not installed"


def test_a_plan_of_another_model_is_refused():
    pytest.importorskip("torchao")
    plan = plan_of(words, "int8_weights")
    other = Workload(nn.Sequential(nn.Linear(128, 512)).eval(), torch.randn(4, 128))
    with pytest.raises(memfit.UsageError, match="which is no weight of a linear layer"):
        memfit.Fitted(other, plan)
