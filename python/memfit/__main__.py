"""The ``memfit`` command.

Responsible for handing the command line to the program and its exit code back. The program is Rust
(``memfit._native``); it asks :class:`memfit.program.host.Host` whatever needs torch, so that
commands which need none (``show``, ``predict`` on a saved trace) start at once.

Ctrl-C: Python keeps its handler. Inside the host it raises ``KeyboardInterrupt`` as usual; while
the engine works, the program asks every 50 ms whether the signal has come. Either way the exit code
is 130 and nothing half-written is left.
"""

from __future__ import annotations

import signal
import sys

from memfit import _native
from memfit.program.host import Host

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> int:
    """Run the program on this process's arguments.

    Returns:
        The exit code, for ``sys.exit``.
    """
    host = Host()
    try:
        code = _native.run(["memfit", *sys.argv[1:]], host)
    except KeyboardInterrupt:
        # The signal came after the last question, on the way out.
        code = INTERRUPTED
    if host.script_ended == "interrupted":
        # Its traceback was shown; the interpreter ends as it does after any Ctrl-C.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    if host.script_ended is not None:
        return code  # exit handlers and threads of the script may still run, and be interrupted
    # The answer is given; what is left is the interpreter's end, which torch makes long.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
