"""Lines on standard error that are memfit's, beside the script's.

Responsible for where they go and for the one line that is rewritten while something lasts. Not
responsible for what they say. Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys


class Announcer:
    """Shows lines to the user, on the standard error that the process began with."""

    def __init__(self, *, shown: bool) -> None:
        """Say nothing yet.

        Args:
            shown: Whether the user wants to be told at all.
        """
        self._shown = shown
        self._passing = False

    def __call__(self, line: str) -> None:
        """Show a line that stays."""
        self._write(f"memfit: {line}\n")

    @property
    def rewrites(self) -> bool:
        """Whether a line can be shown that goes again: on a terminal."""
        stream = sys.__stderr__
        return self._shown and stream is not None and stream.isatty()

    def passing(self, line: str) -> None:
        """Show a line, on a terminal, in place of the last such line."""
        if self.rewrites:
            self._write(f"memfit: {line}")
            self._passing = True

    def done(self) -> None:
        """Take the passing line away."""
        self._write("")

    def _write(self, text: str) -> None:
        if not self._shown or sys.__stderr__ is None:
            return
        start = "\r\x1b[2K" if self._passing else ""
        self._passing = False
        with contextlib.suppress(OSError, ValueError):
            sys.__stderr__.write(start + text)
            sys.__stderr__.flush()
