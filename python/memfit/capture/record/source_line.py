"""Which line of the user's code called an op.

Responsible for walking the Python stack to the nearest frame that belongs neither to torch, nor to
memfit, nor to the standard library, and for giving its file a short name. Not responsible for
modules or regions.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_MEMFIT = str(Path(__file__).parents[2]) + "/"
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"])) + "/"
_PACKAGES = ("/site-packages/", "/dist-packages/")


class SourceLines:
    """Looks up and shortens source lines, remembering what it has seen.

    The walk ends at memfit's own frame that started the step, so a line of the program that called
    memfit is never taken for a line of the model.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._prefixes: dict[CodeType, str | None] = {}
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._roots = [str(Path.cwd()) + "/"]
        self._stop: FrameType | None = None

    def stop_at(self, frame: FrameType | None) -> None:
        """End every walk at ``frame``.

        Args:
            frame: The frame that runs the step; ``None`` walks to the outermost frame.
        """
        self._stop = frame

    def current(self) -> str:
        """The line that called the running op.

        Returns:
            ``file.py:123``, or the empty string when no frame qualifies.
        """
        frame: FrameType | None = sys._getframe(2)
        stop = self._stop
        prefixes = self._prefixes
        while frame is not None and frame is not stop:
            code = frame.f_code
            prefix = prefixes.get(code, "")
            if prefix == "":
                prefix = prefixes[code] = self._prefix(code.co_filename)
            if prefix is not None:
                key = (code, frame.f_lineno)
                line = self._lines.get(key)
                if line is None:
                    line = self._lines[key] = f"{prefix}:{key[1]}"
                return line
            frame = frame.f_back
        return ""

    def raised_at(self, error: BaseException | None) -> list[str]:
        """The lines that an error came through, the innermost first.

        Args:
            error: The error.
        """
        traceback = None if error is None else error.__traceback__
        lines = []
        while traceback is not None:
            prefix = self._prefix(traceback.tb_frame.f_code.co_filename)
            if prefix is not None:
                lines.append(f"{prefix}:{traceback.tb_lineno}")
            traceback = traceback.tb_next
        return lines[::-1]

    def _prefix(self, filename: str) -> str | None:
        """Short name of a file, or ``None`` when its frames are skipped."""
        if filename.startswith(("<", _TORCH, _MEMFIT)):
            return None
        for packages in _PACKAGES:
            if packages in filename:
                return filename.rsplit(packages, 1)[1]
        if filename.startswith(_STANDARD):
            return None
        for root in self._roots:
            if filename.startswith(root):
                return filename[len(root) :]
        return Path(filename).name
