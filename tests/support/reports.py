"""Snapshots and what the program makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import recording

PROGRAM = Path(sys.executable).with_name("memfit")


class Report:
    """A snapshot, its page and its explanation."""

    def __init__(self, snapshot: Path, *recordings: recording.Recording) -> None:
        self.recordings = recordings
        self.page = snapshot.with_suffix(".html")
        done = subprocess.run(
            [PROGRAM, "explain", snapshot, "--html", self.page, "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
        )
        # 1: something was found.
        assert done.returncode in {0, 1}, done.stderr
        self.json = json.loads(done.stdout)
