"""A broker of its own for each test, in a temporary folder, ended with the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import START_SECONDS, Broker


@pytest.fixture
def idle_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker that is not started yet, where leases of this process go."""
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        broker = Broker(Path(folder))
        monkeypatch.setenv("MEMFIT_BROKER", str(broker.socket))
        yield broker
        if broker.process is not None and broker.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                broker.process.kill()
            broker.process.wait(START_SECONDS)


@pytest.fixture
def broker(idle_broker: Broker) -> Broker:
    """A broker with 1000 bytes on the host."""
    return idle_broker.start()


@pytest.fixture
def script(idle_broker: Broker) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a Python script that leases from the broker; it is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "MEMFIT_BROKER": str(idle_broker.socket)}
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
