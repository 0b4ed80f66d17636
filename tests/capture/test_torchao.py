"""Weights that torchao quantised count as what they are: predicted, measured, tracked, named."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import memfit
from memfit.measure import measure_peak, static_tensors

logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao registers enums
transformers = pytest.importorskip("transformers")
quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")

WEIGHT_ONLY = quantization.Int8WeightOnlyConfig
DYNAMIC = quantization.Int8DynamicActivationInt8WeightConfig
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).requires_grad_(requires_grad=False)


def inference(config, dtype=torch.float32):
    model = llama(dtype).eval()
    quantization.quantize_(model, config())
    return memfit.Workload(model, {"input_ids": torch.randint(0, 1000, (2, 64))})


def plain_bytes(model):
    """What the tensors inside of all parameters and buffers take, by their own names."""
    names = ("qdata", "scale", "zero_point")
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        inside = [getattr(parameter, name, None) for name in names]
        found = [tensor for tensor in inside if tensor is not None]
        total += sum(tensor.nbytes for tensor in found or [parameter])
    return total


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(WEIGHT_ONLY, torch.float32), (WEIGHT_ONLY, torch.bfloat16), (DYNAMIC, torch.float32)],
)
def test_prediction_profiler_and_count_agree(config, dtype):
    workload = inference(config, dtype)
    model, batch = workload.model, workload.batch

    @torch.no_grad()
    def step():
        model(**batch)

    step()
    step()
    measured = measure_peak(step, static_tensors(workload, None))
    assert measured.static_bytes == plain_bytes(model) + batch["input_ids"].nbytes
    with memfit.track("step") as tracked:
        step()
    inside = tracked["cpu"].peak_bytes - tracked["cpu"].before_bytes
    assert inside == measured.peak_bytes - measured.static_bytes
    assert memfit.predict(workload).predicted_peak_bytes == measured.peak_bytes


def test_the_parameters_are_what_the_allocator_gave_for_them():
    with memfit.track("quantised") as tracked:
        model = inference(WEIGHT_ONLY).model
    (cpu,) = tracked.as_dict()["devices"]
    before, after = (cpu[f"{when}_by_category"]["parameter"] for when in ("before", "after"))
    assert after - before == plain_bytes(model) - sum(b.nbytes for b in model.buffers())


def test_dynamic_products_are_recorded_for_a_gpu():
    trace = memfit.trace(inference(DYNAMIC), device="cuda")
    assert "aten._int_mm.default" in str(trace.json())


class Adapted(nn.Module):
    """A frozen layer and an adapter of low rank beside it."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def test_training_adapters_on_a_quantised_model_is_predicted_and_planned_exactly():
    model = llama()
    quantization.quantize_(model, WEIGHT_ONLY())
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    ids = torch.randint(0, 1000, (4, 64))
    workload = memfit.Workload(
        model.train(),
        {"input_ids": ids, "labels": ids},
        lambda model, batch: model(**batch).loss,
        lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad]),
    )
    found = memfit.verify(workload, "75%", steps=1)
    assert found.holds
    assert found.gradients.agreement == "bitwise"
    document = found.as_dict()
    for step in (document["unplanned"], document["planned"]):
        assert step["measured_peak_bytes"] == step["predicted_peak_bytes"]
