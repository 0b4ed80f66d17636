"""The measurements for a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _runs_lstm_in_bf16() -> bool:
    """Whether this processor does, for which oneDNN has no way on older ones."""
    with torch.autocast("cpu", torch.bfloat16):
        try:
            torch.nn.LSTM(8, 8)(torch.ones(1, 1, 8))
        except RuntimeError:
            return False
    return True


@pytest.mark.skipif(not _runs_lstm_in_bf16(), reason="torch runs no LSTM in bfloat16 here")
def test_a_model_is_predicted_planned_and_compared(tmp_path: Path):
    done = measure(
        *("peaks", "--device", "cpu", "--small", "--models", "lstm", "--out", str(tmp_path))
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu-peaks.json").read_text())
    assert found["is_complete"]
    assert abs(found["rows"]["lstm fp32"]["peak_error"]) < 1e-5
    (page,) = tmp_path.glob("*-gpu.md")
    (row,) = (line for line in page.read_text().splitlines() if "lstm fp32, minimum" in line)
    assert "| same |" in row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path):
    done = measure("--out", str(tmp_path))
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "no CUDA device is here" in done.stdout + done.stderr
