"""Running a script by itself and under ``memfit run --budget``, and what each left behind.

Responsible for processes, their folders and the comparison that every test makes: the same output,
files and exit code. Not responsible for starting quickly (:mod:`forks`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import FORKS, Command, environment


@dataclass
class Ran:
    """What a process left behind."""

    code: int
    stdout: str
    stderr: str
    files: dict[str, bytes]
    report: dict[str, Any]

    @property
    def fitting(self) -> dict[str, Any]:
        """What was found and done."""
        return self.report["fitting"]  # type: ignore[no-any-return]

    @property
    def loops(self) -> list[dict[str, Any]]:
        """The training loops found."""
        return self.fitting["loops"]  # type: ignore[no-any-return]


def settings(folder: Path) -> dict[str, str]:
    """Environment variables of a process in a folder of its own, which is made.

    Temporary files lie outside it: the path of a socket, as data loaders make them, is short.
    """
    folder.mkdir(parents=True)
    temporary = tempfile.mkdtemp(prefix="ran-")
    (folder / "tmp").symlink_to(temporary)
    return {"TMPDIR": temporary, "HF_HUB_OFFLINE": "1"}


def left_behind(folder: Path, code: int, stdout: str, stderr: str) -> Ran:
    """What is there after a process, which leaves nothing of memfit's on disk."""
    temporary = (folder / "tmp").resolve()
    left = list(temporary.glob("memfit-*"))
    shutil.rmtree(temporary)
    assert not left
    report = folder / "report.json"
    found = json.loads(report.read_text()) if report.exists() else {}
    report.unlink(missing_ok=True)
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    return Ran(code, stdout, stderr, files, found)


def in_processes(commands: list[tuple[list[str], Path]]) -> list[Ran]:
    """Run commands side by side, each in a new process."""
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**environment(), **settings(folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, folder in commands
    ]
    outputs = [process.communicate() for process in processes]
    return [
        left_behind(folder, process.returncode, *texts)
        for (_, folder), process, texts in zip(commands, processes, outputs, strict=True)
    ]


def in_forks(commands: list[tuple[list[str], Path]]) -> list[Ran]:
    """Run commands side by side, without the time that importing torch takes."""
    ends = FORKS.run_all([Command(words, folder, settings(folder)) for words, folder in commands])
    return [
        left_behind(folder, end.code, end.stdout, end.stderr)
        for (_, folder), end in zip(commands, ends, strict=True)
    ]


_ALONE: dict[tuple[str, tuple[str, ...]] | None, Ran] = {}
"""What scripts left behind that stand alone in their folders, by themselves: it does not depend on
the budget, and most run with several."""


def run(
    tmp_path: Path,
    budget: str,
    script: Path,
    *words: str,
    ways: Callable[..., Any] = in_forks,
    offload: str | None = None,
    fitting: Sequence[str] = (),
    fuses: bool = False,
) -> Ran:
    """Run a script by itself and with a budget; everything but time and memory is the same.

    Args:
        offload: Where to; `None` for nowhere, and `chosen` for where memfit sees fit.
        fitting: More options of `memfit run`.
        fuses: Whether the optimizer may run inside backward, which other plans would give way to.
    """
    place = {None: ["--no-offload"], "chosen": []}.get(offload, ["--offload", str(offload)])
    fused = [] if fuses else ["--forbid", "fuse_optimizer"]
    options = ["--budget", budget, "--report", "report.json", *place, *fused, *fitting]
    fitting = ["-m", "memfit", "run", *options]
    command = [str(script), *words]
    alone = (script.read_text(), words) if ways is in_forks and script.parent == tmp_path else None
    commands = [(fitting + command, tmp_path / "fit"), (command, tmp_path / "python")]
    if alone in _ALONE:
        [found], expected = ways(commands[:1]), _ALONE[alone]
    else:
        found, expected = ways(commands)
    if alone is not None:
        _ALONE[alone] = expected
    assert _timeless(found.stdout) == _timeless(expected.stdout), found.stderr
    assert found.code == expected.code, found.stderr
    assert found.files == expected.files
    return found  # type: ignore[no-any-return]


def _timeless(text: str) -> str:
    return re.sub(r"'train_(runtime|\w+_per_second)': '[\d.]+'", "", text)


def inline(tmp_path: Path, budget: str, code: str, *words: str, **options: Any) -> Ran:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    return run(tmp_path, budget, script, *words, **options)


def assert_within_budget(loop: dict[str, Any]) -> None:
    plan, planned = loop["plan"], loop["planned"]
    assert plan["fits"]
    assert plan["actions"], "the budget asks for something"
    assert planned["peak_bytes"] <= plan["budget_bytes"]
    assert planned["peak_bytes"] <= plan["predicted_peak_bytes"]
