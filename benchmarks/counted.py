"""A program run in a process of its own, its tensors counted from outside.

Responsible for the library that counts (tensor_count.c), for processes and their folders, and for
what each left behind. Not responsible for what that is worth.
"""

from __future__ import annotations

import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("tensor_count.c")


@dataclass(frozen=True)
class Ended:
    """What a process left behind."""

    exit_code: int
    output: str
    errors: str
    report: str
    peak_bytes: int
    cpu_seconds: float


class Counter:
    """Runs programs and counts."""

    def __init__(self, folder: Path) -> None:
        """Compile the library.

        Args:
            folder: Where the library and the folders of the processes lie.
        """
        self._folder = folder
        self._library = folder / "tensor_count.so"
        compiler = os.environ.get("CC", "cc")
        flags = ["-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE)]
        subprocess.run([compiler, *flags, "-ldl", "-lpthread"], check=True)

    def run(self, words: list[str], limit_seconds: float) -> Ended:
        """Run Python with these words, on one thread, in an empty folder that goes again."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        numbers = folder / "count"
        inside = folder / "script"
        inside.mkdir()
        settings = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": str(self._library),
            "TENSOR_COUNT_FILE": str(numbers),
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                [sys.executable, *(word.format(folder=folder) for word in words)],
                cwd=inside,
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                timeout=limit_seconds,
                check=False,
            )
            code, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, output, errors = -1, "", f"not over after {limit_seconds} s"
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        _, peak_bytes = struct.unpack("QQ", numbers.read_bytes()) if numbers.exists() else (0, 0)
        report = inside / "run.json"
        text = report.read_text() if report.exists() else ""
        shutil.rmtree(folder)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Ended(code, output, errors, text, peak_bytes, seconds)
