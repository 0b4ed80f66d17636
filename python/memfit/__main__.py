"""The ``memfit`` command.

Responsible for handing the command line to the program and its exit code back. The program is Rust
(``memfit._native``); it asks :class:`memfit.host.Host` whatever needs torch, so that commands which
need none (``show``, ``predict`` on a saved trace) start at once.

Ctrl-C: Python keeps its handler. Inside the host it raises ``KeyboardInterrupt`` as usual; while
the engine works, the program asks every 50 ms whether the signal has come. Either way the exit code
is 130 and nothing half-written is left.
"""

from __future__ import annotations

import os
import signal
import sys

from memfit import _native
from memfit.host import Host

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_PROFILER_LOG = "KINETO_LOG_LEVEL"
"""Torch's profiler, which measures the peaks, talks on standard error below a high level."""


def main() -> int:
    """Run the program on this process's arguments.

    Returns:
        The exit code, for ``sys.exit``.
    """
    os.environ.setdefault(_PROFILER_LOG, "99")
    try:
        code = _native.run(["memfit", *sys.argv[1:]], Host())
    except KeyboardInterrupt:
        # The signal came after the last question, on the way out.
        code = INTERRUPTED
    # The answer is given; what is left is the interpreter's end, which torch makes long.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
