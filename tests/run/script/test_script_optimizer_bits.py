"""A script whose optimizer's state is held in 8 bits, with leave."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from ran import in_forks

SCRIPT = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]
model = nn.Sequential(*layers)
optimizer = {optimizer}
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
for size in {sizes}:
    batch = torch.randn(size, 512)
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(loss.item())
held = optimizer.state[layers[0][0].weight]
kind = type(held).__name__
print(kind, file=sys.stderr)
print(sorted(key for key in held if key != "step"), optimizer.param_groups[0]["lr"])
moment = optimizer.state_dict()["state"][0][sys.argv[1]]
print(moment.dtype, tuple(moment.shape), float(moment.double().square().sum().sqrt()))
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
SGD = "torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)"
SAME = "[64] * 8"
VARIED = "[64, 64, 64, 96, 96, 64, 128, 96, 32, 64]"


def ran(tmp_path: Path, optimizer: str, sizes: str, moment: str, *words: str):
    """The script alone, and within a budget."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(optimizer=optimizer, sizes=sizes))
    fitted = ["-m", "memfit", "run", *words, str(script), moment]
    return in_forks([([str(script), moment], tmp_path / "alone"), (fitted, tmp_path / "fit")])


def numbers(text: str) -> list[float]:
    """Losses, and how long the first moment is."""
    lines = text.splitlines()
    return [float(line) for line in lines[:-2]] + [float(lines[-1].split()[-1])]


@pytest.mark.parametrize(
    ("optimizer", "sizes", "moment", "budget"),
    [
        (ADAMW, SAME, "exp_avg", "18MiB"),
        (ADAMW, VARIED, "exp_avg", "18MiB"),
        (SGD, SAME, "momentum_buffer", "17MiB"),
    ],
)
def test_losses_are_near_and_the_state_reads_as_ever(
    tmp_path: Path, optimizer: str, sizes: str, moment: str, budget: str
):
    leave = ["--allow", "optimizer_bits", "--no-offload", "--forbid", "remat"]
    alone, fit = ran(tmp_path, optimizer, sizes, moment, "--budget", budget, *leave)
    assert (alone.code, fit.code) == (0, 0), fit.stderr
    expected, got = numbers(alone.stdout), numbers(fit.stdout)
    assert got[0] == expected[0]
    assert got != expected
    assert got == pytest.approx(expected, rel=2e-3)
    assert fit.stdout.splitlines()[-2] == alone.stdout.splitlines()[-2]
    assert "EightBitState" in fit.stderr
    assert "optimizer state of 6 parameters in 8 bits" in fit.stderr
    assert "updates are approximate, as was allowed" in fit.stderr
    # The recorded steps too, whose first update makes the state.
    assert "no room for the optimizer's state, so it is held in 8 bits" in fit.stderr
    assert "took more" not in fit.stderr


def test_without_leave_it_is_offered_and_the_state_stays(tmp_path: Path):
    forbid = ["--no-offload", "--forbid", "fuse_optimizer"]
    alone, fit = ran(tmp_path, ADAMW, SAME, "exp_avg", "--budget", "18MiB", *forbid)
    assert fit.stdout == alone.stdout
    assert "EightBitState" not in fit.stderr
    assert "with `--allow approximate` a step would take 17." in fit.stderr


def test_an_optimizer_without_such_a_form_keeps_its_state(tmp_path: Path):
    optimizer = "torch.optim.RMSprop(model.parameters(), lr=1e-3)"
    leave = ["--allow", "optimizer_bits", "--no-offload", "--forbid", "fuse_optimizer"]
    alone, fit = ran(tmp_path, optimizer, SAME, "square_avg", "--budget", "16MiB", *leave)
    assert fit.stdout == alone.stdout
    assert "in 8 bits" not in fit.stderr
    assert "no plan fits 16.0 MiB" in fit.stderr


SCALED = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused={fused}, weight_decay=0.5)
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
for step in range(9):
    batch = torch.randn(64, 512)
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss * float("inf") if step == 5 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item(), scaler.get_scale())
print(optimizer.state[layers[0][0].weight]["step"].item())
print(optimizer.state_dict()["state"][0]["exp_avg"].norm().item())
"""


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_that_leaves_its_scale_to_a_fused_step_is_heeded(tmp_path: Path, *, fused: bool):
    """It calls such a step in any case, also with gradients that are not finite."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCALED).format(fused=fused))
    leave = ["--allow", "optimizer_bits", "--no-offload"]
    fitted = ["-m", "memfit", "run", "--budget", "18MiB", *leave, str(script)]
    alone, fit = in_forks([([str(script)], tmp_path / "alone"), (fitted, tmp_path / "fit")])
    assert (alone.code, fit.code) == (0, 0), fit.stderr
    assert "optimizer state of 6 parameters in 8 bits" in fit.stderr
    expected, got = (it.stdout.split() for it in (alone, fit))
    assert expected[-2] == got[-2] == "8.0", "the overflow is no update"
    pairs = zip(map(float, expected), map(float, got), strict=True)
    assert all(b == pytest.approx(a, rel=5e-3) for a, b in pairs)
