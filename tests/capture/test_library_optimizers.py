"""Optimizers that fail without values, or hide what they take, are captured by small real steps."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

import memfit
from memfit.measure import measure_peak, static_tensors

logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao registers enums


class InBlocks(torch.optim.Optimizer):
    """Looks at values while it is built; holds bytes in blocks of 256 numbers, and more besides."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.table = torch.linspace(0, 1, 4).tolist()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                numbers = parameter.numel()
                if not state:
                    is_held = numbers >= 4096 and numbers % 256 == 0
                    kept = numbers + numbers // 64 + 64 if is_held else 4 * numbers
                    state["codes"] = torch.zeros(kept, dtype=torch.uint8)
                wide = parameter.grad.double() * self.table[-1]
                parameter.sub_(wide.float(), alpha=group["lr"])


class Unusable(InBlocks):
    """Fails on whatever it gets."""

    def step(self, closure=None):
        raise ArithmeticError("no\nstep")


class OnAGpu(InBlocks):
    def __init__(self, params):
        super().__init__(params)
        raise NotImplementedError("a GPU is needed")


def workload(optimizer, *, batch=16, sides=(300, 512, 1024), bias=True):
    torch.manual_seed(0)
    layers = [nn.Linear(*pair, bias=bias) for pair in pairwise(sides)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    x = torch.randn(batch, sides[0])
    return memfit.Workload(model, x, lambda model, x: model(x).square().mean(), optimizer)


def assert_predicted(example, most_off=0.005):
    """Holds a prediction against the allocator's events of a real step, and a plan to its word."""
    predicted = memfit.predict(example).predicted_peak_bytes
    model = example.model
    optimizer = example.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()))

    def step():
        example.loss(model, example.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    # Whatever else a process allocates in a step, as a compiler does, can only add to it.
    measured = min(
        measure_peak(step, static_tensors(example, optimizer)).peak_bytes for _ in range(6)
    )
    assert abs(predicted / measured - 1) <= most_off, (predicted, measured)


def test_state_and_temporaries_are_those_of_real_steps():
    assert_predicted(workload(InBlocks))


def test_an_instance_is_measured_with_its_own_settings():
    example = workload(None)
    example.optimizer = InBlocks(example.model.parameters(), lr=0.5)
    example.optimizer.table = [2.0]
    before = [p.clone() for p in example.model.parameters()]
    assert_predicted(example)
    assert example.optimizer.table == [2.0]
    after = example.model.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_plan_recomputes_around_such_a_step_bitwise():
    example = workload(InBlocks, batch=4096, sides=(64, 64, 64, 64, 64, 64))
    found = memfit.verify(example, budget="70%")
    assert found.holds
    assert found.loss.agreement == found.gradients.agreement == "bitwise"
    assert found.planned.measured_peak_bytes < 0.75 * found.unplanned.measured_peak_bytes


@pytest.mark.parametrize(("optimizer", "said"), [(Unusable, "no"), (OnAGpu, "a GPU is needed")])
def test_what_fails_on_real_tensors_too_is_refused_in_one_sentence(optimizer, said):
    with pytest.raises(memfit.WorkloadError) as refused:
        memfit.predict(workload(optimizer))
    message = str(refused.value)
    assert said in message
    assert "hint: " in message
    assert len(message.splitlines()) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchao_compiles_its_step():
    optimizers = pytest.importorskip("torchao.optim", reason="needs torchao")
    # One parameter, as each shape is compiled for itself, for half a minute.
    assert_predicted(workload(optimizers.AdamWFp8, sides=(64, 64), bias=False))


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "Lion8bit", "PagedAdamW"])
def test_bitsandbytes_runs_ops_of_its_own(name):
    optimizers = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").optim
    assert_predicted(workload(getattr(optimizers, name)))


@pytest.mark.parametrize("name", ["FlashAdamW", "FlashSGD"])
def test_flashoptim_holds_tensors_in_objects(name):
    library = pytest.importorskip("flashoptim", reason="needs flashoptim")
    plain = {"quantize": False, "master_weight_bits": None, "fused": False}
    assert_predicted(workload(lambda params: getattr(library, name)(params, lr=1e-3, **plain)))
    with pytest.raises(memfit.WorkloadError, match="requires a CUDA device"):
        memfit.predict(workload(getattr(library, name)))
