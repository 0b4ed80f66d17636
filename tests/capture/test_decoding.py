"""transformers' `generate` is followed on fakes to its greatest length."""

from __future__ import annotations

import pytest
import torch
from peaks import predicted_peak
from torch import nn

from memfit.capture import record
from memfit.capture.record.decoding import NOTE
from memfit.measure.peak import measure_peak, static_tensors
from memfit.weights.weightless import weightless
from memfit.workload import Workload

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}


def llama():
    config = transformers.LlamaConfig(intermediate_size=128, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **ends))


def decoding(model, new=6, **settings):
    tokens = torch.randint(3, 256, (2, 48))

    def forward(model, batch):
        mask = torch.ones_like(batch)
        settings.setdefault("do_sample", False)
        return model.generate(
            batch, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **settings
        )

    return Workload(model=model.eval(), batch=tokens, forward=forward)


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_without_weights_generates(build, device):
    with weightless():
        workload = decoding(build())
    trace = record(workload, device=device)
    assert trace["meta"]["captured"] == "fake"
    assert trace["meta"]["notes"].count(NOTE) == 1
    choices = trace["strings"].index("aten.argmax.default")
    assert sum(op["name"] == choices for op in trace["ops"]) == 6, "as many as may be new"


@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_peak_is_that_of_decoding_which_no_token_ends(build):
    # Whatever the weights choose, `generate` may not end before.
    workload = decoding(build(), min_new_tokens=6)
    trace = record(workload)
    assert trace["meta"]["captured"] == "fake"

    def decode():
        with torch.no_grad():
            return workload.forward(workload.model, workload.batch)

    decode()
    measured = measure_peak(decode, static_tensors(workload, None)).peak_bytes
    assert predicted_peak(trace) == pytest.approx(measured, rel=0.001)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        chosen = torch.isin(y.argmax(-1), torch.tensor([1, 2]))
        return y.tanh() if chosen.any() else y


def test_tokens_compared_elsewhere_are_not_answered():
    trace = record(Workload(model=Routed(), batch=torch.randn(4, 8), forward=lambda m, b: m(b)))
    assert trace["meta"]["captured"] == "real"
    assert NOTE not in trace["meta"]["notes"]
