"""The wheel that users get, in an environment with nothing else in it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((ROOT / "dist").glob("memfit-*.whl"))

if not WHEELS and os.environ.get("MEMFIT_WHEEL") == "required":
    pytest.fail("`dist/` holds no wheel", pytrace=False)
pytestmark = pytest.mark.skipif(not WHEELS, reason="`dist/` holds no wheel: `make wheel` builds it")

SNAPSHOT = {
    "segments": [],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 1 << 40, "size": 2 << 20, "stream": 0},
            {"action": "alloc", "addr": 1 << 40, "size": 1 << 20, "stream": 0},
            {"action": "free_requested", "addr": 1 << 40, "size": 1 << 20, "stream": 0},
            {"action": "free_completed", "addr": 1 << 40, "size": 1 << 20, "stream": 0},
        ]
    ],
}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and nothing that it needs."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    (wheel,) = WHEELS
    site = next((folder / "lib").glob("python*")) / "site-packages"
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    command += ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True)
    assert (site / "memfit" / "_native.abi3.so").exists()
    return folder / "bin"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_it_is_for_every_python_and_no_newer_system_than_torchs_own_wheels():
    (wheel,) = WHEELS
    assert "-cp311-abi3-manylinux_2_28_" in wheel.name


def test_it_runs_without_torch_where_none_is_needed(empty: Path, tmp_path: Path):
    assert run(empty / "memfit", "--version").stdout.startswith("memfit ")
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps(SNAPSHOT))
    explained = run(empty / "memfit", "explain", snapshot, "--format", "json")
    assert explained.returncode == 0, explained.stderr
    assert json.loads(explained.stdout)["schema_version"] >= 1
    table = tmp_path / "step.csv"
    table.write_text("id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\n")
    placed = run(empty / "memfit", "place", table, "--minimize", "--format", "json")
    assert placed.returncode == 0, placed.stderr
    assert json.loads(placed.stdout)["height"] == 8


def test_it_says_to_install_torch_where_it_is_needed(empty: Path, tmp_path: Path):
    (tmp_path / "step.py").write_text("def build():\n    import torch\n")
    asked = run(empty / "memfit", "predict", f"{tmp_path / 'step.py'}:build")
    assert asked.returncode == 2
    assert "memfit needs torch, which is not installed: `pip install torch`" in asked.stderr
    assert "Traceback" not in asked.stderr
    imported = run(empty / "python", "-c", "import memfit; memfit.plan")
    assert "UsageError: memfit needs torch" in imported.stderr
