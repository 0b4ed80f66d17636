"""Many Python processes from one import of torch: each is a fork of a process that has it.

Responsible for running a command as `python` would, but for the imports, which would be most of its
time. Each has a process id, a folder, environment variables, standard streams, exit handlers
and an exit code of its own. A script that imports torch finds it loaded; whoever waits for that
import, as `memfit run` does, sees it.

Not responsible for what an interpreter is started with. Where an environment variable has another
value than in the process that forks, and is none of those that are read only when they are needed,
the command runs in a new process. Tests of starting, of what is imported when, of options of the
interpreter, of its last moments and of what a process takes as a whole start new processes
themselves.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import IO, Any

READ_LATER = {
    "COLUMNS",
    "HF_HUB_OFFLINE",
    "MEMFIT_BROKER",
    "PYTEST_CURRENT_TEST",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
}
"""Environment variables that nothing reads before a command needs them."""

USED = (
    "memfit.capture",
    "memfit.program.host",
    "memfit.run.fitted",
    "memfit.run.script.script",
    "memfit.verify",
    "torch._dynamo",
    "torch.utils.data",
)
"""What commands and scripts import, by themselves or, as Dynamo, through their first optimizer."""

_MOST_BYTES = 1 << 17
"""More than a command has, its environment variables included."""

_SHORT = 32
"""More bytes than a number has."""


OWN = ("KINETO_LOG_LEVEL", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
"""What memfit and Inductor set in the process that uses them; the latter is an address there."""


def environment() -> dict[str, str]:
    """Environment variables of a process: the caller's, with one thread for computing."""
    few = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {name: value for name, value in few.items() if name not in OWN}


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Command:
    """What follows `python`, where it runs, and environment variables besides the usual ones."""

    words: Sequence[str | Path]
    folder: Path
    settings: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """All environment variables."""
        return {**environment(), **self.settings}


class Forks:
    """The process with torch, from the first command to :meth:`close`."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._control: socket.socket | None = None

    def run(
        self,
        *words: str | Path,
        folder: Path | None = None,
        timeout: float = 120,
        **settings: str,
    ) -> Done:
        """Run a command to its end.

        Args:
            words: What follows `python`: `-c CODE`, `-m MODULE` or a script, and its arguments.
            folder: The folder to run in; this process's where it is not said.
            timeout: Seconds after which it is too late.
            settings: Environment variables besides those of :func:`environment`.
        """
        return self.run_all([Command(words, folder or Path.cwd(), settings)], timeout)[0]

    def run_all(self, commands: Sequence[Command], timeout: float = 600) -> list[Done]:
        """Run commands side by side to their ends."""
        running = [self._start(command) for command in commands]
        return [one.end(timeout) for one in running]

    def close(self) -> None:
        """End the process with torch."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait()
            self._process = self._control = None

    def _start(self, command: Command) -> _Fork | _Fresh:
        if self._control is None:
            self._environment = environment()
            self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    env=self._environment,
                    pass_fds=[theirs.fileno()],
                )
        others = {name for name, _ in self._environment.items() ^ command.environment.items()}
        return _Fork(command, self._control) if others <= READ_LATER else _Fresh(command)


FORKS = Forks()
"""Those of this session."""


class _Started:
    """A process that prints to files."""

    def __init__(self) -> None:
        self._streams: list[IO[str]] = [
            tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
            for _ in range(2)
        ]
        self.output, self.errors = (stream.fileno() for stream in self._streams)

    def end(self, timeout: float) -> Done:
        """Wait for its end."""
        code = self.exit_code(timeout)
        texts = []
        for stream in self._streams:
            with stream:
                stream.seek(0)
                texts.append(stream.read())
        return Done(code, *texts)

    def exit_code(self, timeout: float) -> int:
        raise NotImplementedError


class _Fresh(_Started):
    """One that starts as ever."""

    def __init__(self, command: Command) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            [sys.executable, *command.words],
            cwd=command.folder,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
        )

    def exit_code(self, timeout: float) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


class _Fork(_Started):
    """One that is a child of the process with torch, which tells its id and its exit code."""

    def __init__(self, command: Command, control: socket.socket) -> None:
        super().__init__()
        words = [str(word) for word in command.words]
        request = json.dumps([words, str(command.folder), command.environment]).encode()
        self._status, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(control, [request], [self.output, self.errors, theirs.fileno()])
        self._pid = int(self._status.recv(_SHORT))

    def exit_code(self, timeout: float) -> int:
        with self._status:
            self._status.settimeout(timeout)
            try:
                return int(self._status.recv(_SHORT))
            except TimeoutError:
                os.kill(self._pid, signal.SIGKILL)
                raise


class _Loaded(Loader):
    """Finds and loads the torch that is there."""

    def __init__(self) -> None:
        self._torch = sys.modules.pop("torch")
        self._spec = self._torch.__spec__

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        assert self._spec is not None
        spec = importlib.util.spec_from_loader(name, self, origin=self._spec.origin)
        assert spec is not None
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._torch

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]


class _Server:
    """Forks for each command that comes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> list[str] | None:
        """In a fork, the words of its command; here nothing, once no more come."""
        while True:
            ready, _, _ = select.select([self._control, *self._running], [], [])
            for ended in ready:
                if ended is not self._control:
                    self._tell_end(ended)
                    continue
                request, passed, _, _ = socket.recv_fds(self._control, _MOST_BYTES, 3)
                if not request:
                    return None
                words, folder, variables = json.loads(request)
                pid = os.fork()
                if pid == 0:
                    self._forget()
                    _become(folder, variables, passed)
                    return list(words)
                output, errors, status = passed
                os.close(output)
                os.close(errors)
                told = socket.socket(fileno=status)
                told.send(str(pid).encode())
                self._running[os.pidfd_open(pid)] = pid, told

    def _tell_end(self, ended: int) -> None:
        os.close(ended)
        pid, told = self._running.pop(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with told:
            told.send(str(code).encode())

    def _forget(self) -> None:
        """Close what is not a fork's."""
        self._control.close()
        for running, (_, told) in self._running.items():
            os.close(running)
            told.close()


def _become(folder: str, variables: dict[str, str], passed: list[int]) -> None:
    """Take on a folder, environment variables and streams, with nothing to read."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    output, errors, status = passed
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in (output, errors, status):
        os.close(descriptor)


def _go_on_as(words: list[str]) -> None:
    """Do what `python` does with these words; exceptions end the process as ever."""
    sys.meta_path.insert(0, _Loaded())  # type: ignore[arg-type]
    option, *rest = words
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102 - tests' own code
    elif option == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(option).resolve().parent)
        runpy.run_path(option, run_name="__main__")


class _End:
    """The end of a fork, called after all exit handlers: it takes no modules apart.

    That would copy each page of torch that it writes to.
    """

    code: int | None = None

    def __call__(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)

    def of(self, raised: SystemExit) -> int:
        """The exit code that Python makes of an exception."""
        if raised.code is None:
            return 0
        return raised.code & 0xFF if isinstance(raised.code, int) else 1


def _main() -> None:
    end = _End()
    atexit.register(end)  # the first to be registered is the last to be called
    for name in USED:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has but one thread"
    gc.freeze()  # the collector would copy every page of it in every fork
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's take its operators apart, with a copy of every page
    words = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    try:
        if words is not None:
            _go_on_as(words)
        end.code = 0
    except SystemExit as raised:
        end.code = end.of(raised)
        raise
    except Exception:
        end.code = 1
        raise


if __name__ == "__main__":
    _main()
