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


STARTS = {
    "join": "one = context.Process(target=rank, args=(0,)); one.start(); one.join()\n",
    "spawn": "multiprocessing.start_processes(rank, nprocs=1, start_method='fork')\n",
}


@pytest.mark.parametrize("form", STARTS)
def test_children_are_seen_whose_parent_only_waits(tmp_path: Path, form: str):
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "from torch import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "def rank(_):\n"
        "    own = bytearray(os.urandom(1) * (48 << 20))\n"
        "    time.sleep(2)\n"
        "    sys.exit(len(own) >> 24)\n"
        f"try:\n    {STARTS[form]}"
        "except multiprocessing.ProcessExitedException as error:\n    print(error.exit_code)\n"
        "else:\n    print(one.exitcode, context.active_children() or len([]))\n"
    )
    end = FORKS.run("-m", "memfit", "run", "--report", "r.json", "train.py", folder=tmp_path)
    assert end.stdout.splitlines()[0] == {"join": "3 0", "spawn": "3"}[form]
    found = json.loads((tmp_path / "r.json").read_text())["process"]
    assert found["children"] == 1
    assert 48 * MIB <= found["children_bytes"] < 100 * MIB


@pytest.mark.parametrize(
    "child",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "left = 'time.sleep(60) if os.fork() == 0 else None'",
    ],
    ids=["reaped by the system", "with a child of its own"],
)
def test_a_wait_ends_with_the_child(tmp_path: Path, child: str):
    (tmp_path / "train.py").write_text(
        "import os, signal, time, torch\n"
        "from torch import multiprocessing\n"
        f"left = 'time.sleep(0.2)'\n{child}\n"
        "one = multiprocessing.get_context('fork').Process(target=lambda: exec(left))\n"
        "start = time.time(); one.start(); one.join()\n"
        "print(time.time() - start < 30)\n"
    )
    end = FORKS.run("-m", "memfit", "run", "train.py", folder=tmp_path)
    assert end.stdout.splitlines()[0] == "True"


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


@pytest.mark.parametrize(
    ("samples", "risen"),
    [
        ([0] * 8 + [step * 2 * MIB for step in range(24)], 46),
        ([step * MIB // 4 for step in range(32)], 0),  # little
        ([0] * 16 + [64 * MIB] * 16, 0),  # once
        ([min(step, 12) * 8 * MIB for step in range(32)], 0),  # a cache that is full
        ([step % 8 * 8 * MIB for step in range(32)], 0),  # it goes again
        ([0, 32 * MIB, 64 * MIB, 96 * MIB], 0),  # seen too rarely to tell
    ],
)
def test_memory_outside_tensors_rises_where_every_part_of_a_run_adds_to_it(
    samples: list[int], risen: int
):
    memory = ProcessMemory()
    memory._outside = samples
    assert memory.rise_bytes() == risen * MIB


def test_what_grows_outside_the_tensors_is_worth_a_word(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import os, time, numpy, torch\n"
        "from torch import nn\n"
        "net = nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "texts, arrays = [], {}\n"
        "for step in range(24):\n"
        "    net(torch.randn(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    texts.append(os.urandom(3 << 20))\n"
        "    arrays[step] = numpy.ones(1 << 17)\n"
        "    time.sleep(0.03)\n"
    )
    FORKS.run("-m", "memfit", "run", "--report", "r.json", "train.py", folder=tmp_path)
    risen, held = json.loads((tmp_path / "r.json").read_text())["notes"]
    assert risen.startswith("outside the tensors, memory rose by ")
    assert held == "outside the tensors, `arrays` (train.py) held arrays of numpy of 24.0 MiB"
