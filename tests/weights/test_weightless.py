"""Models built without weights: the same trace, and no way to run them by mistake."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from small_examples import SMALL, small_example
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from memfit import _native
from memfit.capture import record
from memfit.errors import UsageError
from memfit.program import build
from memfit.program.host import Host
from memfit.weights.weightless import WeightsNeededError
from memfit.workload import Workload


@pytest.mark.parametrize("name", SMALL)
def test_a_model_without_weights_gives_the_trace_of_one_with_them(name):
    torch.manual_seed(0)
    ordinary = record(small_example(name), probe=False)
    torch.manual_seed(0)
    with memfit.weightless():
        workload = small_example(name)
    assert all(isinstance(p, FakeTensor) for p in workload.model.parameters())
    light = record(workload, probe=False)
    assert light == ordinary


def test_a_constructor_that_copies_layers_is_not_warned_of_what_memfit_does():
    layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32}
    torch.set_warn_always(True)  # else it is said once in a process, and perhaps was
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with memfit.weightless():
                one = nn.TransformerEncoderLayer(**layer)
                encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
    finally:
        torch.set_warn_always(False)
    assert all(isinstance(p, FakeTensor) for p in encoder.parameters())


def test_shared_parameters_and_their_attributes_survive():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(8, 8)
            self.left.weight.mark = "kept"
            self.right = nn.Linear(8, 8)
            self.right.weight = self.left.weight

    with memfit.weightless():
        model = Tied()
    assert model.left.weight is model.right.weight
    assert model.left.weight.mark == "kept"
    assert len(list(model.parameters())) == 3


def test_a_large_model_takes_no_memory():
    with memfit.weightless():
        model = nn.Sequential(*[nn.Linear(65536, 65536, bias=False) for _ in range(8)])
    workload = Workload(
        model=model,
        batch=torch.randn(4, 65536),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=torch.optim.AdamW,
    )
    prediction = memfit.predict(workload)
    assert prediction.predicted_peak_bytes > 8 * 65536**2 * 4 * 3


def test_the_patch_is_gone_after_an_error():
    original = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError), memfit.weightless():
        raise ZeroDivisionError
    assert nn.Module.register_parameter is original


class _ReadsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if self.linear.weight.sum().item() < 1e9 else x


def _reads_weights() -> Workload:
    return Workload(model=_ReadsWeights(), batch=torch.randn(4, 8), loss=lambda m, b: m(b).mean())


def test_a_step_that_reads_weights_says_so():
    with memfit.weightless():
        workload = _reads_weights()
    with pytest.raises(WeightsNeededError, match="built without weights"):
        memfit.trace(workload)
    assert memfit.trace(_reads_weights()).encode()


def test_a_model_without_weights_cannot_be_fitted():
    with memfit.weightless():
        workload = Workload(
            model=nn.Linear(8, 8), batch=torch.randn(4, 8), loss=lambda m, b: m(b).mean()
        )
    with pytest.raises(WeightsNeededError):
        memfit.fit(workload, "200%")


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(32, 16), nn.BatchNorm1d(16)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight
        self.head.weight.kept = "kept"

    def forward(self, ids):
        return self.head(self.inner(self.words(ids)))


CONVERSIONS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double, float": lambda model: model.double().float(),
    "to a type": lambda model: model.to(torch.float64),
    "to a device": lambda model: model.to("cpu"),
    "type": lambda model: model.type(torch.float16),
    "to empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=list(CONVERSIONS))
def test_a_model_without_weights_is_converted_as_one_with_them(conversion):
    real = conversion(_Tied())
    with memfit.weightless():
        model = conversion(_Tied())
    wanted = {name: (p.shape, p.dtype, p.requires_grad) for name, p in real.named_parameters()}
    found = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert found == wanted
    assert all(isinstance(p, FakeTensor) for p in model.parameters())
    assert model.head.weight is model.words.weight
    assert model.head.weight.kept == "kept"
    buffers = {name: b.dtype for name, b in real.named_buffers()}
    assert {name: b.dtype for name, b in model.named_buffers()} == buffers
    workload = Workload(model, torch.randint(32, (3, 2)), lambda m, b: m(b).float().mean())
    same = Workload(real, torch.randint(32, (3, 2)), lambda m, b: m(b).float().mean())
    assert (
        memfit.predict(workload).predicted_peak_bytes == memfit.predict(same).predicted_peak_bytes
    )


def test_a_converted_parameter_stays_that_of_its_optimizer_and_of_all_its_modules():
    with memfit.weightless():
        model = _Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        listed = optimizer.param_groups[0]["params"]
        model.words.half()
        assert model.head.weight is model.words.weight is listed[0]
        assert listed[0].dtype is torch.float16
        model.to(torch.bfloat16)
    assert [id(p) for p in listed] == [id(p) for p in model.parameters()]
    assert {p.dtype for p in listed} == {torch.bfloat16}


def test_a_recurrent_network_without_weights_is_converted():
    with memfit.weightless():
        model = nn.LSTM(8, 8).double()
    assert {weight.dtype for weight in model._flat_weights} == {torch.float64}
    assert {id(w) for w in model._flat_weights} == {id(p) for p in model.parameters()}


def test_conversions_are_torchs_own_afterwards():
    original = nn.Module._apply
    with memfit.weightless():
        assert nn.Module._apply is not original
    assert nn.Module._apply is original


TARGET = """
import memfit, torch
from torch import nn

class Reading(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        assert self.layers[0].weight.sum().item() != 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build(width: int = 64) -> memfit.Workload:
    return memfit.Workload(Reading(width), torch.randn(2, width), lambda m, b: m(b).mean())
"""


def test_weights_that_have_to_be_built_are_told_of(tmp_path, monkeypatch):
    target = tmp_path / "reading.py"
    target.write_text(TARGET)
    built = build.lightest(f"{target}:build", [], None)
    (note,) = built.notes
    assert note.startswith("the weights were built, 65.0 KiB of them: building without them failed")
    monkeypatch.setattr(build, "available_bytes", lambda: 60_000)
    with pytest.raises(UsageError, match=r"take at least 65\.0 KiB, and 58\.6 KiB are free") as no:
        build.lightest(f"{target}:build", [], None)
    assert "`--real-weights` builds them all the same" in str(no.value)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_who_insists_has_the_weights_built(tmp_path, monkeypatch, device):
    monkeypatch.setattr(build, "available_bytes", lambda: 0)
    file = tmp_path / "plain.py"
    file.write_text(TARGET)
    host, target = Host(), f"{file}:build"
    with pytest.raises(UsageError, match="are free"):
        host.build(target, [], device)
    host.insist_on_weights()
    host.build(target, [], device)
    (note,) = json.loads(_native.Trace.decode(host.capture(target, [], device)).json())["meta"][
        "notes"
    ]
    assert note == "the weights were built, 65.0 KiB of them: `--real-weights` asks for them"
