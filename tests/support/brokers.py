"""A broker in a process of its own, and a bare connection to it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit import _native

APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Runs something in a pid namespace of its own, as containers do."""

START_SECONDS = 60.0
"""How long anything may take on a busy machine."""


class Broker:
    """A broker that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "broker.sock"
        self.log = folder / "broker.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_apart = False

    def start(self, *arguments: str, memory: str = "host=1000", is_apart: bool = False) -> Broker:
        """Start it and wait until it listens; where it sees no process but itself, if asked."""
        self.is_apart = is_apart
        apart = APART if is_apart else []
        command = [*apart, sys.executable, "-m", "memfit", "broker", "--socket", str(self.socket)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--memory", memory, *arguments], stderr=log, stdin=subprocess.DEVNULL
            )
        until(lambda: self.listens() or self.process.poll() is not None)  # type: ignore[union-attr]
        assert self.process.poll() is None, self.log.read_text()
        return self

    def listens(self) -> bool:
        """Whether somebody answers at the socket."""
        try:
            Line(self.socket).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it without warning."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        assert self.process is not None
        if self.is_apart:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            os.kill(int(children.read_text()), number)
        else:
            self.process.send_signal(number)
        return self.process.wait(START_SECONDS)

    def fill_the_disk(self) -> None:
        """Let no file of the broker grow from now on, as on a full disk."""
        self._limit_files(0)

    def empty_the_disk(self) -> None:
        """Let files grow again."""
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        assert self.process is not None
        limits = (size, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits)

    def status(self) -> dict[str, Any]:
        """Who holds what."""
        return _native.LeaseClient(self.socket, "test").status()

    def granted(self) -> int:
        """Bytes granted on the host."""
        bytes_: int = self.status()["devices"][0]["granted_bytes"]
        return bytes_


class Line:
    """A bare connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(START_SECONDS)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self.file = self.socket.makefile("rb")

    def send(self, message: object) -> None:
        """Send one message, or bytes as they are."""
        line = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        self.socket.sendall(line)

    def receive(self) -> dict[str, Any]:
        """The next message; empty at the end."""
        try:
            line = self.file.readline()
        except ConnectionResetError:  # it ended before it read all that was sent
            line = b""
        message: dict[str, Any] = json.loads(line) if line else {}
        return message

    def ask(self, message: object) -> dict[str, Any]:
        """Send one message and take the next."""
        self.send(message)
        return self.receive()

    def hello(self, **fields: object) -> dict[str, Any]:
        """Be let in."""
        return self.ask({"hello": {"version": 1, "name": "bare", **fields}})

    def close(self) -> None:
        """End it."""
        self.file.close()
        self.socket.close()


def until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> float:
    """Wait until something is so; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not come to be"
        time.sleep(0.002)
    return time.monotonic() - start
