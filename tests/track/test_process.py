"""Memory past torch, against what the system says of processes that are made to take it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from forks import FORKS

from memfit.track.process import ProcessMemory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_private_bytes_of_this_process_and_of_a_child(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "from torch import nn\n"
        "own = bytearray(os.urandom(1) * (48 << 20))\n"
        "ready, told = os.pipe(), os.pipe()\n"
        "if os.fork() == 0:\n"
        "    for place in range(0, 24 << 20, 4096):\n"
        "        own[place] = 1  # copies the page\n"
        "    os.write(ready[1], b'1'); os.read(told[0], 1); os._exit(0)\n"
        "os.read(ready[0], 1)\n"
        "model = nn.Linear(8, 8)\n"
        "model(torch.randn(2, 8)).sum().backward()\n"
        "os.write(told[1], b'1'); os.wait()\n"
    )
    FORKS.run("-m", "memfit", "run", "--report", "r.json", "train.py", folder=tmp_path)
    found = json.loads((tmp_path / "r.json").read_text())["process"]
    assert found["children"] == 1
    assert 24 * MIB <= found["children_bytes"] < 100 * MIB
    assert found["resident_peak_bytes"] >= found["private_bytes"] >= 48 * MIB
    assert found["tensor_bytes"] < MIB


def test_what_the_c_library_keeps_is_what_it_gives_back():
    memory = ProcessMemory()
    kept = [bytearray(40_000) for _ in range(1500)]
    last = bytearray(40_000)
    memory.ask()
    kept.clear()
    found = memory.end()
    assert found is not None
    assert found["trimmed_bytes"] >= 20 * MIB
    assert len(last) == 40_000
