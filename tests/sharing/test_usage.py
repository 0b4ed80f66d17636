"""What is in use of each device, as the broker tells; of GPUs by a stand-in for NVML."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from brokers import Broker, until

from memfit import _native

SOURCE = Path(__file__).with_name("nvml.c")
GIB = 2**30


class Gpus:
    """What the stand-in says."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def say(self, *lines: str) -> None:
        """One line a GPU; a reader sees all of them or those of before."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.file)

    def opened(self) -> int:
        """How often the library was opened."""
        opened = Path(f"{self.file}.opened")
        return len(opened.read_bytes()) if opened.exists() else 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in under the name that NVML has."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build the stand-in for NVML")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path.parent


@pytest.fixture
def gpus(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """GPUs for the processes that a test starts."""
    gpus = Gpus(tmp_path / "gpus")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("NVML_STAND_IN", str(gpus.file))
    return gpus


def ps(broker: Broker, *arguments: str) -> str:
    command = [sys.executable, "-m", "memfit", "ps", "--socket", str(broker.socket), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def device(broker: Broker, name: str) -> dict[str, Any]:
    devices = broker.status()["devices"]
    return next(device for device in devices if device["name"] == name)


def test_ps_tells_what_of_the_host_is_in_use(broker: Broker) -> None:
    told = json.loads(ps(broker, "--format", "json"))["broker"]["devices"][0]
    memory = psutil.virtual_memory()
    assert told["total_bytes"] == memory.total
    in_use = memory.total - memory.available
    # Others run on this machine.
    assert told["used_bytes"] == pytest.approx(in_use, abs=memory.total / 10)
    header, row = ps(broker).splitlines()[:2]
    assert header.endswith("in use")
    assert len(row) == len(header)


def test_a_host_of_which_more_could_be_granted_than_is_free_is_named(idle_broker: Broker) -> None:
    total = psutil.virtual_memory().total
    idle_broker.start(memory=f"host={total}")
    words = "more could be granted than is free: memory that nobody leases is in use\n"
    assert words in ps(idle_broker)


def test_a_gpu_that_others_use_is_seen_and_named(idle_broker: Broker, gpus: Gpus) -> None:
    gpus.say("lost", f"{80 * GIB} {GIB} {20 * GIB}")
    idle_broker.start("--memory", "cuda:1=70GiB", "--memory", "cuda:0=40GiB")
    until(lambda: device(idle_broker, "cuda:1")["used_bytes"] is not None)
    told = device(idle_broker, "cuda:1")
    # The driver's own is not free either.
    assert (told["total_bytes"], told["used_bytes"]) == (80 * GIB, 21 * GIB)
    lost = device(idle_broker, "cuda:0")
    assert (lost["total_bytes"], lost["used_bytes"]) == (None, None)
    text = ps(idle_broker)
    assert "cuda:1: 11.00 GiB more could be granted than is free: memory that nobody" in text
    assert "cuda:0: " not in text
    # What is free decides no grant: seventy are granted as before.
    client = _native.LeaseClient(idle_broker.socket, "test")
    _, _, granted = client.acquire({"cuda:1": 70 * GIB}, None, 0, 0, None, None)
    assert granted == {"cuda:1": 70 * GIB}


def test_the_driver_is_opened_once_and_read_again(idle_broker: Broker, gpus: Gpus) -> None:
    gpus.say(f"{80 * GIB} 0 0")
    idle_broker.start("--memory", "cuda:0=70GiB")
    for used in (1, 2, 3):
        gpus.say(f"{80 * GIB} 0 {used}")
        until(lambda used=used: device(idle_broker, "cuda:0")["used_bytes"] == used)  # type: ignore[misc]
    gpus.say("lost")
    until(lambda: device(idle_broker, "cuda:0")["used_bytes"] is None)
    assert gpus.opened() == 1


def test_the_driver_is_not_opened_without_a_gpu_to_grant(broker: Broker, gpus: Gpus) -> None:
    broker.kill()
    broker.start()
    assert device(broker, "host")["used_bytes"] > 0
    assert gpus.opened() == 0


def test_prometheus_gets_what_is_known(idle_broker: Broker, gpus: Gpus) -> None:
    gpus.say("lost", f"{80 * GIB} {GIB} 5")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    idle_broker.start(*("--memory", "cuda:0=1GiB", "--memory", "cuda:1=1GiB", "--metrics", address))
    until(lambda: device(idle_broker, "cuda:1")["used_bytes"] is not None)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert f'memfit_device_used_bytes{{device="cuda:1"}} {GIB + 5}\n' in text
    assert f'memfit_device_total_bytes{{device="cuda:1"}} {80 * GIB}\n' in text
    assert 'memfit_device_used_bytes{device="host"} ' in text
    assert 'memfit_device_used_bytes{device="cuda:0"}' not in text
