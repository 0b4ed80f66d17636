"""Models built without weights: the same trace, and no way to run them by mistake."""

from __future__ import annotations

import warnings

import pytest
import torch
from small_examples import SMALL, small_example
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from memfit.capture import record
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
