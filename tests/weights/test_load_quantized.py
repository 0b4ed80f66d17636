"""Models that are quantised while they are loaded: the same numbers, and little memory."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch
from alone import alone
from torch import nn

import memfit
from memfit.errors import CheckpointError, UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.measure.peak import storage_bytes

logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao registers enums
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
IDS = torch.arange(48).view(2, 24)


def test_without_torchao_it_is_refused_with_a_hint(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match=r"torchao.*not installed\nhint: `pip install memfit\[q"):
        memfit.load_quantized(lambda: nn.Linear(2, 2), tmp_path / "missing")


def test_what_nothing_quantises_to_is_refused():
    def build():
        raise AssertionError("refused before anything is built")

    with pytest.raises(UsageError, match=r"`bits=4`: none of torchao's packings .* runs on a CPU"):
        memfit.load_quantized(build, "missing", bits=4)
    with pytest.raises(UsageError, match="`bits=3`"):
        memfit.load_quantized(build, "missing", bits=3)
    with pytest.raises(UsageError, match=r"`dtype=torch.int8`"):
        memfit.load_quantized(build, "missing", dtype=torch.int8)


@pytest.fixture
def quantization():
    return pytest.importorskip("torchao.quantization", reason="needs torchao")


@pytest.fixture
def save_file():
    return pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file


def llama(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, **heads, use_cache=False, **options)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=300, n_layer=2, n_embd=64, n_head=4)
    return transformers.GPT2LMHeadModel(config).eval()


def trained(build):
    torch.manual_seed(3)
    return build()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def quantised_in_full(quantization, model):
    config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    quantization.quantize_(model, config)
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_computes_what_the_model_quantised_in_full_does(
    quantization, save_file, tmp_path, dtype
):
    full = trained(llama)
    save_file(full.state_dict(), tmp_path / "weights.safetensors")
    found = memfit.load_quantized(llama, tmp_path / "weights.safetensors", dtype=dtype)
    if dtype is not None:
        for parameter in full.parameters():
            parameter.data = parameter.data.to(dtype)
    quantised_in_full(quantization, full)
    assert torch.equal(logits(full), logits(found.model))
    for (name, expected), (_, got) in zip(
        full.named_parameters(), found.model.named_parameters(), strict=True
    ):
        assert type(expected) is type(got), name
        assert expected.dtype == got.dtype, name
        assert expected.requires_grad == got.requires_grad, name
    assert found.quantized == 15
    assert found.bytes == storage_bytes([*found.model.parameters(), *found.model.buffers()])


def test_its_layers_multiply_in_8_bits_where_that_is_asked_for(quantization, save_file, tmp_path):
    full = trained(llama)
    save_file(full.state_dict(), tmp_path / "weights.safetensors")
    try:
        found = memfit.load_quantized(llama, tmp_path / "weights.safetensors", dynamic=True)
    except UsageError as error:
        pytest.skip(str(error))
    plain = memfit.load_quantized(llama, tmp_path / "weights.safetensors")
    config = quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    quantization.quantize_(full, config)
    assert torch.equal(logits(full), logits(found.model))
    assert not torch.equal(logits(plain.model), logits(found.model))
    assert found.bytes == plain.bytes
    workload = memfit.Workload(found.model, {"input_ids": IDS})
    measured = measure_peak(lambda: logits(found.model), static_tensors(workload, None))
    assert memfit.predict(workload).predicted_peak_bytes == measured.peak_bytes


def test_the_report_says_what_stayed_and_why(quantization, save_file, tmp_path):
    save_file(trained(llama).state_dict(), tmp_path / "weights.safetensors")
    found = memfit.load_quantized(llama, tmp_path / "weights.safetensors")
    assert str(found).splitlines() == [
        "LlamaForCausalLM: 318.2 KiB, unquantised 893.0 KiB",
        "  quantised  15 weights: 778.5 KiB -> 203.7 KiB",
        "  kept       114.5 KiB",
        "    112.5 KiB  1 tensor of `Embedding`: no `nn.Linear`",
        "      1.9 KiB  5 tensors of `LlamaRMSNorm`: no `nn.Linear`",
        "         96 B  2 tensors of `LlamaRotaryEmbedding`: a module buffer that no file has",
    ]


def test_gpt2s_layers_are_no_linear_and_its_head_stays_tied(quantization, save_file, tmp_path):
    full = trained(gpt2)
    state = full.state_dict()
    del state["lm_head.weight"]  # as transformers saves it
    save_file(state, tmp_path / "weights.safetensors")
    found = memfit.load_quantized(gpt2, tmp_path / "weights.safetensors")
    assert found.model.lm_head.weight is found.model.transformer.wte.weight
    assert found.quantized == 0
    reasons = {(one.module, one.reason) for one in found.kept}
    assert ("Embedding", "shared with an `nn.Linear`; quantised, it would be two") in reasons
    assert ("Conv1D", "no `nn.Linear`") in reasons
    assert torch.equal(logits(full), logits(found.model))


class Twice(nn.Module):
    """Two layers with one weight, a norm with statistics, a recurrent layer and one of torch's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(40)
        self.recurrent = nn.LSTM(40, 40, batch_first=True)
        self.attention = nn.MultiheadAttention(40, 2, batch_first=True)
        self.register_buffer("phase", torch.arange(40.0).cos(), persistent=False)

    def forward(self, x):
        x = self.norm(self.second(self.first(x) + self.phase).transpose(1, 2)).transpose(1, 2)
        x = self.recurrent(x)[0]
        return self.attention(x, x, x, need_weights=False)[0]


def test_shared_layers_stay_shared_and_torchs_others_are_left(quantization, tmp_path):
    full = trained(Twice)
    full(torch.randn(4, 6, 40))  # statistics
    torch.save(full.state_dict(), tmp_path / "weights.pt")
    found = memfit.load_quantized(Twice, tmp_path / "weights.pt")
    assert found.model.second.weight is found.model.first.weight
    assert found.quantized == 1
    left = {one.module for one in found.kept if "torchao leaves" in one.reason}
    assert left == {"NonDynamicallyQuantizableLinear"}
    quantised_in_full(quantization, full)
    x = torch.randn(4, 6, 40)
    assert torch.equal(full.eval()(x), found.model.eval()(x))


def test_several_files_are_read_as_one(quantization, save_file, tmp_path):
    full = trained(llama)
    state = full.state_dict()
    names = list(state)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, of_file in halves.items():
        save_file({name: state[name] for name in of_file}, tmp_path / file)
    index = {"weight_map": {name: file for file, of in halves.items() for name in of}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = memfit.load_quantized(llama, tmp_path)
    assert torch.equal(logits(quantised_in_full(quantization, full)), logits(found.model))


def test_other_tensors_than_the_models_are_refused(quantization, tmp_path):
    def saved(**changes):
        state = {**trained(Twice).state_dict(), **changes}
        torch.save({k: v for k, v in state.items() if v is not None}, tmp_path / "weights.pt")
        return tmp_path / "weights.pt"

    wrong = {
        r"lacks `norm\.weight`$": {"norm.weight": None},
        r"has `more`, which the model has not": {"more": torch.ones(2)},
        r"lacks `norm\.weight` and has `norm\.gain`": {
            "norm.weight": None,
            "norm.gain": torch.ones(40),
        },
        r"`norm\.weight` has shape \(3,\) in .* and \(40,\) in the model": {
            "norm.weight": torch.ones(3)
        },
        r"`first\.weight` and `second\.weight` are one tensor of the model and differ": {
            "second.weight": torch.ones(40, 40)
        },
        r"`first\.bias` is `torch\.int8` in": {"first.bias": torch.ones(40, dtype=torch.int8)},
        r"`first\.weight` is `torch\.float64`, in which layers do not compute": {
            "first.weight": torch.ones(40, 40, dtype=torch.float64),
            "second.weight": None,
        },
    }
    for message, changes in wrong.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            memfit.load_quantized(Twice, saved(**changes))
        assert "\n" not in str(caught.value)


class OfItsOwn(nn.Linear):
    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)


class Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("norm", self.layer.weight.norm(), persistent=False)


def test_models_that_cannot_be_loaded_like_this_are_refused(quantization, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, path)
    there_before = nn.Linear(3, 3)
    before = there_before.weight
    cases = {
        "`weight` has been there before": lambda: there_before,
        "must return an `nn.Module`, got `int`": lambda: 3,
        "loads its state by code of its own": lambda: OfItsOwn(3, 3),
    }
    for message, build in cases.items():
        with pytest.raises(UsageError, match=message):
            memfit.load_quantized(build, path)
    assert there_before.weight is before
    torch.save(Derived().state_dict(), path)
    with pytest.raises(UsageError, match="`norm` is computed from weights"):
        memfit.load_quantized(Derived, path)


def test_there_is_never_more_than_the_result_and_a_layer(quantization, save_file, tmp_path):
    """Judged by the count of torch's allocations, and by the system: private resident bytes."""
    path = tmp_path / "weights.safetensors"
    layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(15)], nn.Linear(1024, 4096))
    save_file(layers.state_dict(), path)
    tiny = tmp_path / "tiny.safetensors"
    save_file(nn.Linear(4, 4).state_dict(), tiny)
    found = alone(f"""
        import logging, time
        from memfit.track import cpu
        nn = torch.nn
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        memfit.load_quantized(lambda: nn.Linear(4, 4), "{tiny}")  # what is imported first
        def build():
            return nn.Sequential(
                *[nn.Linear(1024, 1024) for _ in range(15)], nn.Linear(1024, 4096)
            )
        highest, is_over = 0, False
        def watch():
            global highest
            while not is_over:
                highest = max(highest, status("RssAnon"))
                time.sleep(0.0005)
        assert cpu.start() is None
        gc.collect()
        window = cpu.Window()
        before = window.read().current_bytes, status("RssAnon")
        watcher = threading.Thread(target=watch)
        watcher.start()
        loaded = memfit.load_quantized(build, "{path}")
        seen = window.close()
        is_over = True
        watcher.join()
        answer(
            result=loaded.bytes, unquantised=loaded.unquantized_bytes,
            counted=seen.peak_bytes - before[0], resident=highest - before[1],
            left=seen.current_bytes - before[0],
        )
    """)
    largest = 4 * 1024 * 4096
    assert found["unquantised"] == 4 * 1024 * 1024 * (15 + 4)
    assert found["left"] == found["result"]
    bound = 1.05 * (found["result"] + largest)
    assert found["counted"] <= bound
    assert found["resident"] <= bound
    assert bound < found["unquantised"] / 1.8
