"""What is in use of each device, as the broker tells; of GPUs by a stand-in for NVML."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from brokers import Broker, until

from memfit import _native
from memfit.errors import LeaseError

SOURCE = Path(__file__).parents[2] / "support/nvml.c"
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
    words = "more could be granted than is free: memory without a lease is in use\n"
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
    assert "cuda:1: 11.00 GiB more could be granted than is free: memory without a lease" in text
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


def leases(broker: Broker) -> Any:
    return _native.LeaseClient(broker.socket, "test")


def lease_of(client: Any, claims: dict[str, int], wait: float | None = 0.0) -> int:
    lease, _, granted = client.acquire(claims, None, 0, wait, None, None)
    assert granted == claims
    return int(lease)


def test_of_a_gpu_no_more_is_granted_than_others_leave(idle_broker: Broker, gpus: Gpus) -> None:
    """Others have 50 of 80 GiB: 29 are left beside the driver's one, whatever may be granted."""
    gpus.say(f"{80 * GIB} {GIB} {50 * GIB} 1 {50 * GIB}")
    idle_broker.start("--only-free", "--memory", "cuda:0=70GiB")
    until(lambda: device(idle_broker, "cuda:0")["occupied_bytes"] == 41 * GIB)
    assert device(idle_broker, "cuda:0")["free_bytes"] == 29 * GIB
    words = "cuda:0: 41.00 GiB are not granted while others than lease holders use them\n"
    assert words in ps(idle_broker)
    client = leases(idle_broker)
    with pytest.raises(LeaseError) as refused:
        lease_of(client, {"cuda:0": 30 * GIB})
    assert (refused.value.reason, refused.value.largest_bytes) == ("no_room", 29 * GIB)
    # What is granted and not yet taken is promised: it is not free for a second.
    first = lease_of(client, {"cuda:0": 20 * GIB})
    other = leases(idle_broker)
    with pytest.raises(LeaseError):
        lease_of(other, {"cuda:0": 10 * GIB})
    # Taken, it is the holder's: the others' share is what it was.
    used = f"1 {50 * GIB} {os.getpid()} {20 * GIB}"
    gpus.say(f"{80 * GIB} {GIB} {70 * GIB} {used}")
    until(lambda: device(idle_broker, "cuda:0")["used_bytes"] == 71 * GIB)
    assert device(idle_broker, "cuda:0")["free_bytes"] == 9 * GIB
    # Who waits is served when the others leave.
    waiting = threading.Thread(target=lease_of, args=(other, {"cuda:0": 40 * GIB}, 60.0))
    waiting.start()
    until(lambda: len(idle_broker.status()["waiting"]) == 1)
    gpus.say(f"{80 * GIB} {GIB} {20 * GIB} {os.getpid()} {20 * GIB}")
    waiting.join()
    assert device(idle_broker, "cuda:0")["granted_bytes"] == 60 * GIB
    client.release(first)


def test_a_slow_driver_frees_nothing_while_it_is_waited_for(
    idle_broker: Broker, gpus: Gpus
) -> None:
    gpus.say(f"{80 * GIB} {GIB} {50 * GIB} 1 {50 * GIB}")
    idle_broker.start("--only-free", "--memory", "cuda:0=70GiB")
    until(lambda: device(idle_broker, "cuda:0")["occupied_bytes"] == 41 * GIB)
    slow = Path(f"{gpus.file}.slow")
    slow.touch()
    until(lambda: device(idle_broker, "cuda:0")["used_bytes"] is None)
    client = leases(idle_broker)
    looks_end = time.monotonic() + 1.5  # two or three of the looks that come twice a second
    while time.monotonic() < looks_end:
        with pytest.raises(LeaseError) as refused:
            lease_of(client, {"cuda:0": 30 * GIB})
        assert refused.value.reason == "no_room"
        told = device(idle_broker, "cuda:0")
        assert (told["used_bytes"], told["occupied_bytes"]) == (None, 41 * GIB)
    gpus.say(f"{80 * GIB} {GIB} {30 * GIB} 1 {30 * GIB}")
    slow.unlink()
    until(lambda: device(idle_broker, "cuda:0")["occupied_bytes"] == 21 * GIB)
    # One that does not answer at all holds nothing back.
    gpus.say("lost")
    until(lambda: device(idle_broker, "cuda:0")["occupied_bytes"] == 0)


def test_of_the_host_no_more_is_granted_than_is_free(idle_broker: Broker) -> None:
    memory = psutil.virtual_memory()
    idle_broker.start("--only-free", memory=f"host={memory.total}")
    client = leases(idle_broker)
    with pytest.raises(LeaseError) as refused:
        lease_of(client, {"host": memory.total - GIB // 4})
    assert refused.value.reason == "no_room"
    told = device(idle_broker, "host")
    available = psutil.virtual_memory().available
    assert told["free_bytes"] == pytest.approx(available, abs=memory.total / 10)
    assert told["occupied_bytes"] > 0
    lease_of(client, {"host": GIB})
    # Never too much for ever: what is above the capacity is refused as that.
    with pytest.raises(LeaseError) as refused:
        lease_of(leases(idle_broker), {"host": memory.total + 1}, None)
    assert refused.value.reason == "above_capacity"
