"""Linear layers of an inference that multiply in 8 bits: bytes, bits, time, refusals."""

from __future__ import annotations

import copy
import json
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from rates import costs_file
from torch import nn
from torch.nn import functional

import memfit
from memfit import _native
from memfit.capture import capture
from memfit.measure import calibrate, measure_peak, static_tensors
from memfit.plan import alternatives
from memfit.weights import eight_bit_products
from memfit.weights.weightless import weightless
from memfit.workload import Workload

quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")

ALONE = ("chunk", "micro_batch")
BOTH = ("int8_weights", "int8_dynamic")


@pytest.fixture(autouse=True)
def _right_products():
    if not eight_bit_products._are_right_here():
        pytest.skip("this processor multiplies 8 bits wrongly")


class Words(nn.Module):
    """An embedding below linear layers of several shapes."""

    def __init__(self, width=128):
        super().__init__()
        self.words = nn.Embedding(100, width)
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 103, bias=False)

    def forward(self, x):
        h = self.words(x)
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            h = h + narrow(functional.gelu(wide(self.norm(h))))
        return self.head(h)


def words(rows=2):
    torch.manual_seed(0)
    return Workload(Words().eval(), torch.randint(0, 100, (rows, 8)))


def perceptron(rows=64):
    torch.manual_seed(0)
    sides = (256, *[512] * 8, 8)
    layers = (nn.Sequential(nn.Linear(*pair), nn.GELU()) for pair in pairwise(sides))
    return Workload(nn.Sequential(*layers).eval(), torch.randn(rows, 256))


def of_library(kind, batch, **form):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**form)
    head = "ForImageClassification" if kind == "ViT" else "ForCausalLM"
    head = {"GPT2": "LMHeadModel"}.get(kind, head)
    return Workload(getattr(transformers, f"{kind}{head}")(config).eval(), batch())


def tokens():
    return {"input_ids": torch.randint(0, 300, (2, 48))}


llama = partial(
    of_library,
    "Llama",
    tokens,
    vocab_size=300,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    use_cache=False,
)
gpt2 = partial(
    of_library,
    "GPT2",
    tokens,
    vocab_size=300,
    n_embd=128,
    n_layer=2,
    n_head=4,
    use_cache=False,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
)
vit = partial(
    of_library,
    "ViT",
    lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    image_size=64,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def planned(workload, *kinds, budget="400%", **keywords):
    keywords.setdefault("forbid", ALONE)
    return memfit.plan(workload, budget, allow=kinds, **keywords)


@cache
def plan_of(build, *kinds):
    """The plan of the least bytes."""
    lowest = planned(build(), *kinds, budget="1KiB")
    plan = planned(build(), *kinds, budget=int(1.02 * lowest.minimum_peak_bytes) + 4096)
    assert plan.fits
    return plan


def action_of(plan, kind="int8_dynamic"):
    return next((it for it in plan.actions if it.kind == kind), None)


def refusal_of(plan, kind="int8_dynamic"):
    return next(it.reason for it in plan.refusals if it.kind == kind)


def quantise(model, config, names):
    """What a person does with torchao."""
    chosen = config(set_inductor_config=False)
    quantization.quantize_(model, chosen, lambda _, path: f"{path}.weight" in names)


def outputs(found):
    return found if torch.is_tensor(found) else found.logits


@pytest.mark.parametrize("build", [words, perceptron, llama, gpt2, vit])
def test_bytes_are_predicted_and_numbers_are_those_of_torchao(build):
    plan = plan_of(build, "int8_dynamic")
    assert action_of(plan) is not None
    workload = build()
    names = set(action_of(plan).int8_dynamic.dynamic)
    assert names == set(action_of(plan).int8_dynamic.names)
    own = copy.deepcopy(workload.model)
    quantise(own, quantization.Int8DynamicActivationInt8WeightConfig, names)
    with torch.no_grad():
        batch = workload.batch
        expected = outputs(own(**batch) if isinstance(batch, dict) else own(batch))
    one = memfit.Fitted(workload, plan)
    assert torch.equal(outputs(one.step()), expected)
    measured = measure_peak(one.step, static_tensors(workload, None)).peak_bytes
    assert abs(plan.planned.predicted_peak_bytes - measured) <= 16  # a number or two in passing
    before = {name: p for name, p in workload.model.named_parameters() if name in names}
    one.close()
    for name, parameter in workload.model.named_parameters():
        if name in names:
            assert parameter is not before[name]
            assert parameter.dtype is torch.float32
            assert torch.equal(parameter, own.get_parameter(name).dequantize())


def test_what_is_faster_is_chosen(tmp_path):
    # Either fits; on some processors `int8_weights` packs matrices in more scratch memory.
    either = (plan_of(perceptron, kind).planned.predicted_peak_bytes for kind in BOTH)
    budget = int(1.1 * max(either))
    kinds = {"allow": BOTH, "forbid": (*ALONE, "half_parameters")}
    for rates, chosen in [({"int8": 4e9}, 1), ({"int8": 1e8}, 0), ({}, 0)]:
        plan = memfit.plan(perceptron(), budget, costs=costs_file(tmp_path, **rates), **kinds)
        assert [action.kind for action in plan.actions] == [BOTH[chosen]]
    fast = costs_file(tmp_path, int8=4e9)
    for forbid, chosen in [((), 1), ((BOTH[1],), 0)]:
        forbidden = (*kinds["forbid"], "autocast", *forbid)
        plan = memfit.plan(perceptron(), budget, costs=fast, allow="approximate", forbid=forbidden)
        assert [action.kind for action in plan.actions] == [BOTH[chosen]], plan
    assert (
        0.2 < planned(perceptron(), BOTH[1], budget=budget, costs=fast).predicted_step_ratio < 0.5
    )


def test_a_machine_says_how_fast_it_multiplies_8_bits():
    assert calibrate()["flops_per_second"]["int8"] > 1e8


def test_weights_are_the_same_with_and_without():
    workload = words()
    one = memfit.Fitted(workload, plan_of(words, "int8_weights"))
    first = one.step()
    weight = workload.model.narrow[1].weight
    codes = weight.qdata.clone()
    one.follow(plan_of(words, "int8_dynamic"))
    second = one.step()
    assert workload.model.narrow[1].weight is weight
    assert torch.equal(weight.qdata, codes)
    assert not torch.equal(first, second)
    assert torch.equal(second, memfit.Fitted(words(), plan_of(words, "int8_dynamic")).step())
    one.follow(plan_of(words, "int8_weights"))
    assert torch.equal(one.step(), first)
    one.close()


def test_modules_that_are_kept_multiply_as_they_did():
    plan = planned(words(), "int8_dynamic", budget="90%", keep=["narrow", "head"])
    assert action_of(plan).int8_dynamic.dynamic == tuple(f"wide.{i}.weight" for i in range(4))
    workload = words()
    one = memfit.Fitted(workload, plan)
    one.step()
    assert type(workload.model.narrow[0].weight) is nn.Parameter
    assert type(workload.model.wide[0].weight).__name__ == "Int8Tensor"
    one.close()


def text():
    return words(rows=64)


def test_layers_that_have_no_room_for_it_have_weights_in_8_bits_alone():
    high, low = (plan_of(text, kind).planned.predicted_peak_bytes for kind in reversed(BOTH))
    assert low < 0.9 * high
    plan = planned(text(), "int8_dynamic", budget=(low + high) // 2)
    assert plan.fits
    said = action_of(plan).int8_dynamic
    alone = set(said.names) - set(said.dynamic)
    assert 0 < len(alone) < len(said.names)
    assert any(f"{len(said.dynamic)} of {len(said.names)} weights" in it for it in plan.notes)
    workload = text()
    one = memfit.Fitted(workload, plan)
    found = one.step()
    measured = measure_peak(one.step, static_tensors(workload, None)).peak_bytes
    assert abs(plan.planned.predicted_peak_bytes - measured) <= 16
    own = text().model
    quantise(own, quantization.Int8WeightOnlyConfig, alone)
    quantise(own, quantization.Int8DynamicActivationInt8WeightConfig, set(said.dynamic))
    with torch.no_grad():
        assert torch.equal(found, own(workload.batch))


def many():
    return perceptron(rows=1024)


def test_pieces_of_a_batch_and_a_loop_of_ones_own():
    whole = plan_of(many, "int8_dynamic")
    expected = memfit.Fitted(many(), whole).step()
    peak = whole.planned.predicted_peak_bytes
    plan = planned(many(), "int8_dynamic", budget=peak // 2, forbid=("chunk",))
    assert plan.fits
    assert {action.kind for action in plan.actions} == {"int8_dynamic", "micro_batch"}
    one = memfit.Fitted(many(), plan)
    assert torch.equal(one.step(), expected)
    measured = measure_peak(one.step, static_tensors(one.workload, None)).peak_bytes
    assert abs(plan.planned.predicted_peak_bytes - measured) <= 16
    one.close()
    plan = planned(many(), "int8_dynamic", budget=int(1.05 * peak), own_loop=True)
    assert action_of(plan) is not None
    one = memfit.Fitted(many(), plan)
    with one.forward():
        assert torch.equal(one.workload.model(one.workload.batch), expected)
    one.close()


def test_verify_says_how_far_outputs_are_off():
    alone, both = (
        memfit.verify(words, plan=plan_of(words, kind), steps=1).outputs.error for kind in BOTH
    )
    assert 0 < alone < both < 0.03
    plan = plan_of(words, "int8_dynamic")
    assert not memfit.verify(words, plan=plan, steps=1, max_error=0.1 * both).holds
    assert any("further off than with weights in 8 bits alone" in note for note in plan.notes)


def test_a_model_without_weights_is_planned_as_one_with_them():
    with weightless():
        absent = planned(words(), "int8_dynamic", budget="90%")
    there = planned(words(), "int8_dynamic", budget="90%")
    assert action_of(absent) is not None
    assert absent.planned.predicted_peak_bytes == there.planned.predicted_peak_bytes


def test_leave_is_its_own_and_needs_that_of_weights():
    assert action_of(planned(words(), "int8_weights", budget="90%")) is None
    forbidden = planned(words(), "int8_dynamic", forbid=(*ALONE, "int8_weights"))
    assert refusal_of(forbidden) == "it needs `int8_weights`, which is forbidden"
    forbidden = planned(words(), "int8_dynamic", forbid=(*ALONE, "int8_dynamic"))
    assert refusal_of(forbidden) == "forbidden by the request"
    trains = Workload(
        words().model, words().batch, lambda m, x: m(x).square().mean(), torch.optim.SGD
    )
    reason = refusal_of(planned(trains, "int8_dynamic"))
    assert reason == "the step trains, and weights in 8 bits cannot"


def test_where_the_processor_adds_up_wrongly_it_is_refused(monkeypatch):
    plan = plan_of(words, "int8_dynamic")
    monkeypatch.setattr(eight_bit_products, "_are_right_here", lambda: False)
    refused = planned(words(), *BOTH, budget="90%")
    assert "are wrong on this processor" in refusal_of(refused)
    assert action_of(refused, "int8_weights") is not None
    with pytest.raises(memfit.UsageError, match="wrong on this processor"):
        memfit.Fitted(words(), plan)


def in_way(workload, **held):
    """The trace of a workload on a GPU, with what became of weights in 8 bits there."""
    trace = _native.Trace.decode(capture(workload, device="cuda"))
    way = {"int8_weights": held}
    found = alternatives.with_alternatives(workload, trace, [way], device="cuda")
    return json.loads(found.json())["alternatives"]


def test_a_gpu_takes_many_rows_and_sides_in_eights():
    def layers(rows, *sides):
        model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sides)))
        return Workload(model.eval(), torch.randn(rows, sides[0]))

    names = ["0.weight", "1.weight"]
    found = in_way(layers(32, 64, 256, 100), names=names, dynamic=names)
    (step,) = found["steps"]
    assert step["int8_weights"] == {"names": names, "dynamic": names[:1]}
    assert "aten._int_mm.default" in step["trace"]["strings"]
    none = in_way(layers(32, 64, 100), names=names[:1], dynamic=names[:1])
    assert none["int8_refusal"].startswith("`0.weight` has none: it is 100 x 64, and products in")
    few = in_way(layers(16, 64, 256), names=names[:1], dynamic=names[:1])
    assert "`0` multiplies 16 rows" in few["int8_refusal"]


def test_a_plan_that_says_nonsense_is_refused():
    plan = plan_of(words, "int8_dynamic").as_dict()
    for action in plan["actions"]:
        action["int8_dynamic"]["dynamic"] = ["words.weight"]
    with pytest.raises(memfit.UsageError, match="is malformed"):
        memfit.Fitted(words(), plan)
