"""Running the installed program as a person would, but for the time that importing torch takes.

Responsible for what most tests ask of the program: arguments in; exit code and output back. The
console script runs in a fork (:mod:`forks`); tests of its start run it themselves.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import FORKS, environment

__all__ = ["FOLDER", "PROGRAM", "Outcome", "environment", "run"]

FOLDER = Path(__file__).parent
PROGRAM = Path(sys.executable).with_name("memfit")


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.stdout)


def run(*arguments: str, folder: Path = FOLDER, timeout: float = 120) -> Outcome:
    """Run ``memfit`` in a folder and wait."""
    done = FORKS.run(PROGRAM, *arguments, folder=folder, timeout=timeout)
    return Outcome(done.code, done.stdout, done.stderr)
