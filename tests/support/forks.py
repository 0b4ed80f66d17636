"""Many short scripts from one import of torch: each runs in a fork of a process that has it.

Responsible for running a command as `python` or `python -m memfit` would, but for the import, which
would be most of the time. A script that imports torch finds it loaded; whoever waits for that
import, as `memfit run` does, sees it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FEW_THREADS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment variables of every process."""


USED = ("memfit.run.script.script", "memfit.run.fitted", "torch.utils.data", "torch._dynamo")
"""What scripts import, by themselves or, as the last, through their first optimizer."""


class Forks:
    """The process with torch, from the first command to :meth:`end`."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[str] | None = None

    def run(self, commands: list[tuple[list[str], Path, dict[str, str]]]) -> list[int]:
        """Run commands side by side to their ends.

        Args:
            commands: Words, the folder to run in, and environment variables to set. Output goes to
                `stdout` and `stderr` in the parent of the folder, behind the folder's name.

        Returns:
            Their exit codes.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, **FEW_THREADS},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [(words, str(folder), environment) for words, folder, environment in commands]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def output(folder: Path, stream: str) -> Path:
    """Where a command that ran in a folder left what it printed."""
    return folder.with_name(f"{folder.name}.{stream}")


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


def _serve() -> None:
    """Run what is asked for, until there is no more."""
    for name in USED:
        importlib.import_module(name)
    gc.freeze()  # the collector would copy every page of it in every fork
    for line in iter(sys.stdin.readline, ""):
        children = []
        for words, folder, environment in json.loads(line):
            child = os.fork()
            if child == 0:
                os.environ.update(environment)
                _become(Path(folder))
                _go_on_as(words)
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _become(folder: Path) -> None:
    """Go to a folder, with nothing to read and output in files."""
    os.chdir(folder)
    tempfile.tempdir = None
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(output(folder, stream), flags, 0o644), number)


def _go_on_as(words: list[str]) -> None:
    """Do what `python` does with these words; exceptions end the process as ever."""
    sys.meta_path.insert(0, _Loaded())  # type: ignore[arg-type]
    if words[:2] == ["-m", "memfit"]:
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module("memfit", run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
