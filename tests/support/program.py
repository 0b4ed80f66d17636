"""Running the installed program as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def environment() -> dict[str, str]:
    """The caller's environment with one thread, so that tests do not fight for cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, folder: Path = FOLDER, timeout: float = 120) -> Outcome:
    """Run ``memfit`` in a folder and wait."""
    done = subprocess.run(
        [PROGRAM, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
