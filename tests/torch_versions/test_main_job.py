"""What memfit is for, end to end, in a minute: this is what runs on the oldest torch as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit import _native
from memfit.measure import measure_peak, static_tensors
from memfit.track import cpu

WIDTH, ROWS, DEPTH = 96, 128, 8

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[
    layer for _ in range(8) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(repr(loss.item()))
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


def workload() -> memfit.Workload:
    torch.manual_seed(0)
    return memfit.Workload(
        model=nn.Sequential(*(Block() for _ in range(DEPTH))),
        batch=torch.randn(ROWS, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )


def two_steps(fitted: memfit.Fitted) -> list[Tensor]:
    """Losses and parameters after two steps."""
    torch.manual_seed(1)
    losses = [fitted.step().detach() for _ in range(2)]
    return [*losses, *(p.detach().clone() for p in fitted.workload.model.parameters())]


def unplanned() -> list[Tensor]:
    return two_steps(memfit.Fitted(workload(), {"actions": []}))


@pytest.mark.parametrize("fraction", [None, 0.9, 0.7])
def test_prediction_is_the_measured_peak_and_the_plan_is_bitwise_within_budget(fraction):
    peak = memfit.predict(workload()).predicted_peak_bytes
    if fraction is None:
        fitted = memfit.Fitted(workload(), {"actions": []})
        predicted = peak
    else:
        budget = int(peak * fraction)
        plan = memfit.plan(workload(), budget=budget)
        assert plan.fits
        fitted = memfit.Fitted(workload(), plan.as_dict())
        predicted = plan.planned.predicted_peak_bytes
        assert predicted <= budget
    found = two_steps(fitted)
    assert all(torch.equal(a, b) for a, b in zip(found, unplanned(), strict=True))
    measured = measure_peak(fitted.step, static_tensors(fitted.workload, fitted.optimizer))
    # A fused update makes scalars of its own, some bytes in all.
    assert 0 <= measured.peak_bytes - predicted <= 64


def test_activations_and_state_are_offloaded_bitwise_within_budget(tmp_path: Path):
    options = {"offload": tmp_path, "forbid": ["offload_parameters"]}
    budget = int(memfit.plan(workload(), budget="1GiB", **options).minimum_peak_bytes * 1.2)
    with memfit.fit(workload(), budget=budget, **options) as fitted:
        kinds = {action.kind for action in fitted.plan.actions}
        assert kinds & {"offload", "offload_optimizer"}
        found = two_steps(fitted)
        measured = measure_peak(fitted.step, static_tensors(fitted.workload, fitted.optimizer))
    assert measured.peak_bytes <= budget
    assert all(torch.equal(a, b) for a, b in zip(found, unplanned(), strict=True))


def test_a_script_trains_the_same_within_its_budget(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    command = [sys.executable, "-m", "memfit", "run", "--budget", "7MiB", script]
    fitted = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert fitted.stdout == alone.stdout
    assert "planned for 7.0 MiB; results stay bitwise equal" in fitted.stderr


def test_the_guard_refuses_above_its_budget():
    assert cpu.start() is None
    with memfit.guard(_native.taken_bytes() + (8 << 20)):
        keep = torch.zeros(4 << 20, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="tried to allocate"):
            torch.zeros(6 << 20, dtype=torch.uint8)
        del keep


def test_a_parked_model_comes_back_as_it_was(tmp_path: Path):
    model = workload().model
    batch = workload().batch
    with torch.no_grad():
        expected = model.eval()(batch)
        parked = memfit.park(model, tmp_path)
        with pytest.raises(memfit.ParkError):
            model(batch)
        parked.wake()
        assert torch.equal(model(batch), expected)
