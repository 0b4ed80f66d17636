"""What a compiled step is held against, and by how much it may be off."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.run.fitted import Fitted
from memfit.verify import compiled

NOTHING = {"actions": []}


def build(dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh())
    workload = memfit.Workload(
        model, torch.randn(16, 8), square, lambda p: torch.optim.AdamW(p, lr=1e-2)
    )
    eager = Fitted(workload, NOTHING)
    return replace(workload, optimizer=eager.optimizer), eager


def square(model, batch):
    return model(batch).square().mean()


def off_by(workload, error):
    """The step with a loss that is off by a relative error, and gradients with it."""
    return Fitted(replace(workload, loss=lambda m, b: square(m, b) * (1 + error)), NOTHING)


def judged(workload, eager, alone, planned):
    with compiled.random_state_kept():
        return compiled._compare(workload, compiled.State.of(workload), eager, alone, planned)


@pytest.mark.parametrize(("error", "kind"), [(1.5e-4, "equivalent"), (5e-4, "different")])
def test_rounding_is_measured_by_what_torch_alone_is_off(error, kind):
    workload, eager = build()
    compared, against, yardstick = judged(
        workload, eager, off_by(workload, 1e-4), off_by(workload, error)
    )
    assert yardstick == pytest.approx(1e-4, rel=1e-2)
    assert against == {"reference": "eager", "tolerance": 2 * yardstick}
    assert compared["gradients"]["agreement"] == kind
    assert compared["gradients"]["max_relative_error"] == pytest.approx(error, rel=1e-2)


def test_an_error_that_is_no_rounding_is_no_yardstick():
    workload, eager = build()
    wrong = off_by(workload, 0.5)
    compared, against, yardstick = judged(workload, eager, wrong, wrong)
    assert yardstick == pytest.approx(0.5, rel=1e-2)
    assert against["tolerance"] == pytest.approx(1e-5)
    assert compared["loss"]["agreement"] == "different"


def test_a_step_that_draws_is_held_against_the_one_that_draws_the_same(monkeypatch):
    workload, eager = build(dropout=0.5)
    monkeypatch.setattr(compiled, "_compiled", lambda workload, *, eager_numbers: workload)

    def other_numbers(model, batch):
        torch.rand(3)
        return square(model, batch)

    inductor = Fitted(replace(workload, loss=other_numbers), NOTHING)
    compared, against, yardstick = judged(workload, eager, inductor, inductor)
    assert against == {"reference": "torch_compile", "tolerance": 1e-5}
    assert yardstick == pytest.approx(0.0)
    assert compared["gradients"]["agreement"] == "bitwise"
    compared, *_ = judged(workload, eager, inductor, eager)
    assert compared["gradients"]["agreement"] == "different"


def test_a_step_that_cannot_be_compiled_says_why():
    def infers():
        return memfit.Workload(nn.Linear(4, 4), torch.randn(2, 4))

    found = compiled.verify_compiled(infers, {}, 1 << 30, {})
    assert "inference" in found["not_compiled"]
    found = compiled.verify_compiled(lambda: build()[0], {}, 1 << 30, {"forbid": ["remat"]})
    assert "`forbid` has `remat`" in found["not_compiled"]
