"""Looks at children while their parent waits for them.

A script that starts its ranks and waits takes no step of its own at which it could be looked at.
Responsible for waits without an end, of ``multiprocessing`` and with it of
``torch.multiprocessing.spawn``: they wait in turns. Not responsible for what is looked at
(:mod:`memfit.track.process`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

_TURN_SECONDS = 0.5


class Waits:
    """The waits of the thread that makes this, in this process and in no child."""

    def __init__(self, look: Callable[[], None]) -> None:
        """Change nothing yet.

        Args:
            look: Called between two turns.
        """
        self._look = look
        self._of = os.getpid(), threading.get_ident()
        self._before: tuple[Any, Any] | None = None
        self._own: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Wait in turns from now on."""
        wait, join = self._before = connection.wait, BaseProcess.join

        @functools.wraps(wait)
        def wait_in_turns(object_list: Iterable[Any], timeout: float | None = None) -> list[Any]:
            if timeout is not None or not self._is_own():
                return wait(object_list, timeout)
            waited_for = list(object_list)
            while not (ready := wait(waited_for, _TURN_SECONDS)):
                self._look()
            return ready

        @functools.wraps(join)
        def join_in_turns(process: BaseProcess, timeout: float | None = None) -> None:
            if timeout is None and self._is_own():
                join(process, 0)  # refuses what cannot be waited for
                # What has ended has no exit code where the script has it reaped by others, and its
                # sentinel waits on where it has left children behind.
                while process.exitcode is None and not wait([process.sentinel], _TURN_SECONDS):
                    self._look()
            join(process, timeout)

        self._own = wait_in_turns, join_in_turns
        connection.wait, BaseProcess.join = self._own  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """Wait as before, unless others have changed how since."""
        if self._before is not None and (connection.wait, BaseProcess.join) == self._own:
            connection.wait, BaseProcess.join = self._before  # type: ignore[method-assign]

    def _is_own(self) -> bool:
        return self._of == (os.getpid(), threading.get_ident())
