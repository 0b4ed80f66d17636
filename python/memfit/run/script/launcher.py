"""Running a script as ``python`` would, and saying how it ended.

Responsible for ``sys.argv``, ``sys.path``, ``__main__``, exceptions and exit codes, which are to be
as without memfit. Not responsible for what is counted meanwhile (:mod:`memfit.run.script.summary`).

Imports no torch: the script may set environment variables before it does.
"""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal

from memfit.errors import UsageError

Ended = Literal["finished", "exited", "exception", "interrupted"]

_PACKAGE = Path(__file__).parents[2]
_LOOKS_ON = (
    _PACKAGE / "run" / "script",
    *(_PACKAGE / room for room in ("apply", "capture", "tensors", "track")),
)
"""Folders of what runs between the script and torch; what a script calls itself lies in others."""

_OPS = ("torch", "_ops.py")
"""Where memfit calls an op by its name, as scripts do not."""

_OF_IMPORTS = Path(__file__).with_name("imports.py")
"""What runs between Python's import of a library and the library."""

_OF_FAULTS = (AssertionError, AttributeError, KeyError, NameError)


@dataclass(slots=True, frozen=True)
class Ending:
    """How a script came to its end.

    Attributes:
        ended: In which way.
        exit_code: What ``python`` would have exited with, 0 to 255.
        error: The exception that nothing caught.
    """

    ended: Ended
    exit_code: int
    error: BaseException | None = None


def run(command: Sequence[str], *, is_module: bool) -> Ending:
    """Run a script to its end; what it prints and raises is shown as ``python`` shows it.

    Args:
        command: The script or module, and its arguments.
        is_module: Whether it is a module, as with ``python -m``.

    Returns:
        How it ended.

    Raises:
        UsageError: There is no such file.
    """
    name = command[0]
    require(name, is_module=is_module)
    sys.argv = list(command)
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    vars(main)["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):  # later ones make it when it is asked for
        vars(main)["__annotations__"] = {}
    try:
        if is_module:
            _lead_path(str(Path.cwd()))
            _run_as_main(name, alter_argv=True)
        elif pkgutil.get_importer(name) is not None:  # a folder or an archive with a `__main__.py`
            _lead_path(str(Path.cwd() / name))
            _run_as_main("__main__", alter_argv=False)
        else:
            _lead_path(str(Path(name).resolve().parent))
            _run_file(name, main)
    except SystemExit as error:
        return Ending("exited", _exit_code(error.code))
    except KeyboardInterrupt as error:
        _show(error)
        return Ending("interrupted", 130, error)
    except BaseException as error:  # noqa: BLE001 - whatever a script raises, `python` shows
        _show(error)
        return Ending("exception", 1, error)
    return Ending("finished", 0)


def require(name: str, *, is_module: bool) -> None:
    """See that there is a script, before anything is done for it.

    Raises:
        UsageError: There is no such file.
    """
    if not is_module and not Path(name).exists():
        raise UsageError(f"there is no file `{name}`")


def _lead_path(folder: str) -> None:
    """Put a folder where ``python`` puts the script's: in place of that of the program."""
    if sys.flags.safe_path:
        return
    sys.path[0:1] = [folder]


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    # What `python -m` itself calls; the public `run_module` restores `__main__` at the end, which
    # threads and exit handlers of the script still need.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run_file(name: str, main: ModuleType) -> None:
    path = str(Path.cwd() / name)
    with io.open_code(path) as file:
        source = file.read()
    vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 - running the user's script is the purpose


def _exit_code(code: Any) -> int:
    """What the process exits with after ``sys.exit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    _flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{code}\n")
    return 1


def _show(error: BaseException) -> None:
    """Show an exception as ``python`` does, without memfit's own frames."""
    _flush()
    error.__traceback__ = _own_frames(error.__traceback__, all_of_it=not _may_be_memfits(error))
    sys.excepthook(type(error), error, error.__traceback__)


def _may_be_memfits(error: BaseException) -> bool:
    """Whether the exception may be a fault of memfit's, whose frames are worth being shown then."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # What torch's functions in C++ raise has no frame of its own, and is none of these.
    return isinstance(error, _OF_FAULTS) and trace is not None and _looks_on(_file(trace))


def _own_frames(trace: TracebackType | None, *, all_of_it: bool) -> TracebackType | None:
    """A traceback without the frames of memfit that ``python`` would not show.

    Args:
        trace: The traceback.
        all_of_it: Whether what runs ops in the script's place is left out, too.
    """
    while trace is not None and _PACKAGE in _file(trace).parents:
        trace = trace.tb_next
    kept = trace
    while kept is not None:
        # The script may use memfit itself: only frames that look on are left out here.
        following, is_of_memfit = _past_import(kept.tb_next), False
        while following is not None and (
            _looks_on(_file(following), all_of_it=all_of_it)
            or (is_of_memfit and _file(following).parts[-2:] == _OPS)
        ):
            following, is_of_memfit = following.tb_next, True
        kept.tb_next = following
        kept = following
    return trace


def _past_import(trace: TracebackType | None) -> TracebackType | None:
    """What follows an import's own frames, which ``python`` shows where others are among them."""
    at, is_among_them = trace, False
    while at is not None and (
        str(_file(at)).startswith("<frozen importlib") or _file(at) == _OF_IMPORTS
    ):
        is_among_them |= _file(at) == _OF_IMPORTS
        at = at.tb_next
    return at if is_among_them else trace


def _file(trace: TracebackType) -> Path:
    return Path(trace.tb_frame.f_code.co_filename)


def _looks_on(file: Path, *, all_of_it: bool = True) -> bool:
    folders = _LOOKS_ON if all_of_it else _LOOKS_ON[:1]
    return any(folder in file.parents for folder in folders)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def flush() -> None:
    """Write out what the script has printed, before anything else is printed."""
    _flush()


def is_child(process: int) -> bool:
    """Whether this is a process that the script forked off, which has no summary to print."""
    return os.getpid() != process
