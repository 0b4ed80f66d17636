"""Ctrl-C waits where half of something would be left behind.

Responsible for running updates of parameters to their end. Not responsible for transfers, which a
Ctrl-C ends at once: each of them can be begun again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect at the end of this; a second one does at once."""
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):
        yield
        return
    came: list[Any] = []

    def wait(number: int, frame: Any) -> None:
        came.append(frame)
        if len(came) > 1:
            handler(number, frame)

    try:
        signal.signal(signal.SIGINT, wait)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(signal.SIGINT, came[0])
