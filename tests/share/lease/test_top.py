"""``memfit top`` and ``memfit devices`` as a person and a program meet them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from brokers import START_SECONDS, Broker, until
from torch import nn

import memfit
from memfit import _native

LEAVES_SCREEN = b"\x1b[?1049l"
SHOWS_CURSOR = b"\x1b[?25h"


def memfit_program(broker: Broker, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memfit", *words],
        env={**os.environ, "MEMFIT_BROKER": str(broker.socket), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * START_SECONDS,
        check=False,
    )


class Screen:
    """`memfit top` on a terminal of its own."""

    def __init__(self, broker: Broker) -> None:
        self._master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (30, 120))
        self.before = termios.tcgetattr(self._slave)
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "memfit", "top", "--interval", "0.1"],
            env={**os.environ, "MEMFIT_BROKER": str(broker.socket), "TERM": "xterm"},
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
        )
        os.set_blocking(self._master, False)

    def read(self) -> bytes:
        """All that was written to the terminal so far."""
        try:
            while more := os.read(self._master, 1 << 16):
                self.shown += more
        except BlockingIOError:
            pass
        return self.shown

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    def end(self) -> int:
        """Wait for the end, reading on; the exit code."""
        until(lambda: self.read() is not None and self.process.poll() is not None)
        self.read()
        return self.process.wait(START_SECONDS)

    def is_as_before(self) -> bool:
        """Whether the terminal's settings are those it had."""
        return termios.tcgetattr(self._slave)[:4] == self.before[:4]

    def close(self) -> None:
        """Close both ends."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(START_SECONDS)
        os.close(self._master)
        os.close(self._slave)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda screen: screen.type(b"q"), 0),
        (lambda screen: screen.type(b"\x03"), 0),
        (lambda screen: screen.process.send_signal(signal.SIGTERM), 130),
    ],
    ids=["key", "ctrl_c", "sigterm"],
)
def test_the_terminal_is_as_before_however_it_ends(
    idle_broker: Broker, end: Callable[[Screen], None], code: int
) -> None:
    screen = Screen(idle_broker)
    try:
        until(lambda: b"memfit top" in screen.read())
        assert not screen.is_as_before()
        screen.type(b"m ")
        time.sleep(0.3)
        end(screen)
        assert screen.end() == code, screen.shown
        assert LEAVES_SCREEN in screen.shown
        assert screen.shown.rindex(LEAVES_SCREEN) > screen.shown.rindex(b"memfit top")
        assert SHOWS_CURSOR in screen.shown
        assert screen.is_as_before()
    finally:
        screen.close()


def test_one_frame_names_holders_and_those_that_wait(
    broker: Broker, script: Callable[[str], subprocess.Popen[str]]
) -> None:
    holder = _native.LeaseClient(broker.socket, "holder")
    holder.acquire({"host": 700}, None, 0, 0, None, None)
    waiter = script("import memfit; memfit.lease(600, wait=60)")
    until(lambda: bool(broker.status()["waiting"]))
    text = memfit_program(broker, "top", "--once").stdout
    assert "broker: 1 lease, 1 waiting" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "700 B" in rows[str(os.getpid())]
    assert "waits for 600 B" in rows[str(waiter.pid)]
    document = json.loads(memfit_program(broker, "top", "--once", "--format", "json").stdout)
    first, second = document["processes"][:2]
    assert (first["pid"], first["waits_for_bytes"]) == (waiter.pid, 600)
    assert (second["pid"], second["leased_bytes"]) == (os.getpid(), 700)
    host = document["devices"][0]
    assert (host["granted_bytes"], host["grantable_bytes"]) == (700, 1000)


def test_without_a_broker_devices_and_processes_are_shown(idle_broker: Broker) -> None:
    text = memfit_program(idle_broker, "top", "--once")
    assert text.returncode == 0
    assert "no broker runs" in text.stdout
    document = json.loads(memfit_program(idle_broker, "top", "--once", "--format", "json").stdout)
    assert not document["has_broker"]
    own = next(row for row in document["processes"] if row["pid"] == os.getpid())
    assert own["host_bytes"] > 50 << 20


def test_a_frame_needs_a_terminal_unless_it_is_one(idle_broker: Broker) -> None:
    done = memfit_program(idle_broker, "top")
    assert done.returncode == 2
    assert "--once" in done.stderr


TARGET = """
import torch, memfit
def build():
    return memfit.Workload(model=torch.nn.Linear(64, 64), batch=torch.randn(8, 64),
                           loss=lambda model, batch: model(batch).sum())
"""


def test_devices_say_where_a_step_fits_and_the_leased_room_counts(
    idle_broker: Broker, tmp_path: Path
) -> None:
    target = tmp_path / "step.py"
    target.write_text(TARGET)
    words = ("devices", "--fit", f"{target}:build", "--format", "json")
    alone = json.loads(memfit_program(idle_broker, *words).stdout)
    assert alone["best"] == "host"
    host = alone["devices"][0]
    assert host["fits"]
    assert host["room_bytes"] == host["free_bytes"] > host["needed_bytes"] > 32 * 1024
    idle_broker.start(memory=f"host={host['needed_bytes'] - 1}")
    full = memfit_program(idle_broker, *words)
    assert full.returncode == 1
    document = json.loads(full.stdout)
    assert (document["best"], document["devices"][0]["fits"]) == (None, False)
    assert document["devices"][0]["room_bytes"] == host["needed_bytes"] - 1
    assert "does not fit" in memfit_program(idle_broker, *words[:3]).stdout


def test_a_device_is_named_or_the_numbers_are(idle_broker: Broker) -> None:
    step = memfit.Workload(
        model=nn.Linear(64, 64),
        batch=torch.randn(8, 64),
        loss=lambda model, batch: model(batch).sum(),
    )
    assert memfit.device(step).type == ("cuda" if torch.cuda.is_available() else "cpu")
    idle_broker.start(memory="host=1000")
    if not torch.cuda.is_available():
        with pytest.raises(memfit.DoesNotFit, match="`host` has 1000 B of"):
            memfit.device(step)
