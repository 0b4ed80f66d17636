"""Memory in files where a script lacks room that nothing else gives.

A single large op may take more than a budget: its result, or what it computes with; and so may the
models that are made before the first step. What torch asks for then comes from a file on a disk in
place of memory: the same numbers, later. The system writes its pages out when memory gets short.
Responsible for from when on that is done, and for how much.
Not responsible for the blocks (``memfit-guard``), nor for what plans have in files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from memfit import _native
from memfit.run.script.place import folder_of_files
from memfit.run.script.request import FitRequest

_PART_FOR_SMALL_BLOCKS = 1 / 64
"""Part of the budget that steps without a plan that fits leave to blocks too small for files."""

_PART_OF_DISK = 1 / 2
"""Of what was free, at most so much is taken."""

_KINDS = frozenset(("offload", "offload_optimizer", "offload_parameters"))
"""Where one of them is forbidden, nothing else goes to files either."""


def may_hold(request: FitRequest, device: torch.device) -> bool:
    """Whether steps that no plan fits may have files for what they lack room for.

    Args:
        request: Where files may be.
        device: Where they run.
    """
    # A block does not tell what it will hold.
    is_forbidden = not _KINDS.isdisjoint(request.options.forbid)
    return device.type == "cpu" and not is_forbidden and bool(folder_of_files(request))


class Overflow:
    """Files for what a script has no room for."""

    def __init__(self, request: FitRequest) -> None:
        """Make no file yet.

        Args:
            request: Where files may be.
        """
        self._request = request
        self._folder = ""
        self._most_bytes = self._peak_bytes = 0

    def begin(self, budget_bytes: int) -> None:
        """Have what lacks room before the first pass in files, where that will not be on a GPU.

        Args:
            budget_bytes: The budget; 0 as long as it is not known.
        """
        if torch.cuda.device_count() == 0:  # asks the driver for nothing that a fork would miss
            self.pass_begins(budget_bytes, torch.device("cpu"), fits=False)

    def pass_begins(self, budget_bytes: int, device: torch.device, *, fits: bool) -> None:
        """Have what lacks room in files from now on, on the CPU.

        Args:
            budget_bytes: The budget; with 0, as long as it is not known, nothing is done.
            device: Where the pass runs.
            fits: Whether it runs by a plan that leaves room for all that it takes.
        """
        if not (budget_bytes and may_hold(self._request, device)):
            return
        if not self._folder:
            self._folder = folder_of_files(self._request)
            self._most_bytes = int(shutil.disk_usage(Path(self._folder)).free * _PART_OF_DISK)
        self.pass_ended()  # and what ran since
        kept_free = 0 if fits else int(budget_bytes * _PART_FOR_SMALL_BLOCKS)
        _native.set_overflow(self._folder, budget_bytes - kept_free, self._most_bytes)

    def pass_ended(self) -> int:
        """Most bytes that the pass asked for at once, where some were in files; else 0."""
        in_files_bytes, asked_bytes = _native.overflow_peaks()
        self._peak_bytes = max(self._peak_bytes, in_files_bytes)
        return asked_bytes

    def end(self) -> list[str]:
        """Make no more files; what is said of those that there were."""
        self.pass_ended()
        _native.set_overflow("", 0, 0)
        if not self._peak_bytes:
            return []
        size = _native.bytes_text(self._peak_bytes)
        where = f"files in `{self._folder}`, {size} at most"
        return [f"what nothing else has room for is in {where}; `--no-offload` forbids it"]
