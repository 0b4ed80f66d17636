"""``memfit run --allow autocast``: passes under autocast, inside the script's own loop."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from ran import Ran, in_processes, inline

SCRIPT = """
    import contextlib, sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [it for _ in range(3) for it in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(1024, 64), torch.randint(0, 10, (1024,))
    for step in range(5):
        optimizer.zero_grad()
        with AROUND:
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), torch.is_autocast_enabled("cpu"))
    with torch.no_grad():
        print(model(x[:2]).dtype)
"""


def script(around: str = "contextlib.nullcontext()") -> str:
    return SCRIPT.replace("AROUND", around)


def cast_by_hand(step: str) -> str:
    """The same under the script's own autocast from a step on."""
    dtype = "torch.bfloat16, cache_enabled=False"
    return script(f'torch.autocast("cpu", {dtype}, enabled=step >= {step})')


def allowed(tmp_path: Path, budget: str, code: str, **options: Any) -> Ran:
    fitting = ("--allow", "autocast")
    return inline(tmp_path, budget, code, fitting=fitting, **options)


def actions_of(loop: dict[str, Any]) -> set[str]:
    return {action["kind"] for action in loop["plan"]["actions"]}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_where_nothing_else_fits_passes_run_under_autocast_to_the_bit_of_ones_own(tmp_path: Path):
    # The first step is recorded as it is, the second under autocast.
    for name, code in (("plain.py", script()), ("own.py", cast_by_hand("1"))):
        (tmp_path / name).write_text(dedent(code))
    options = ("--budget", "50%", "--report", "report.json", "--no-offload", "--allow", "autocast")
    fitting = ["-m", "memfit", "run", *options, str(tmp_path / "plain.py")]
    ran, own = in_processes(
        [(fitting, tmp_path / "fit"), ([str(tmp_path / "own.py")], tmp_path / "python")]
    )
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "autocast" in actions_of(loop)
    predicted, measured = loop["plan"]["predicted_peak_bytes"], loop["planned"]["peak_bytes"]
    assert predicted - (2 << 20) <= measured <= predicted
    assert loop["plan"]["unplanned_peak_bytes"] > loop["plan"]["budget_bytes"]
    assert "approximate" in ran.stderr
    assert ran.stdout == own.stdout


def test_a_budget_that_an_exact_plan_keeps_leaves_numbers_as_they_are(tmp_path: Path):
    ran = allowed(tmp_path, "85%", script())
    assert "autocast" not in actions_of(ran.loops[0])
    assert ran.loops[0]["observed"]["steps"] == 1


def test_a_script_that_autocasts_by_itself_is_left_alone_and_that_is_said(tmp_path: Path):
    ran = allowed(tmp_path, "30%", cast_by_hand("0"))
    (loop,) = ran.loops
    assert "autocast" not in actions_of(loop)
    assert any("the script autocasts by itself" in note for note in loop["notes"])
