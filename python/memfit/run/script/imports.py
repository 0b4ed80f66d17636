"""What an import of torch leaves in memory, and the garbage collector.

Responsible for keeping the collector away from it: importing torch makes some 250,000 objects that
live as long as the process, every full collection looks at all of them again, and the last one, at
the end, takes longer than all others. Not responsible for seeing the import
(:mod:`memfit.run.script.summary`).

The script's own objects are collected as ever, but for those that were there before torch. Where
there were any, all are the collector's again at the end: what the last collection lets go of, such
as a file with bytes still to be written, is the script's.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from memfit.libraries import is_library, module_name

_ATOMS = (str, bytes, int, float, complex, type(None))
_SPEECH = ("__future__", "typing")
"""Modules whose objects are words of the language."""


class Imported:
    """The objects of an import, out of the collector's sight."""

    def __init__(self) -> None:
        """Know which modules are there before the script begins."""
        self._before = frozenset(sys.modules)
        self._frozen = 0
        self._was_first = False

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """What is made inside, if nothing fails, and what was there before is not looked at."""
        was_on = gc.isenabled()
        self._was_first = not self._has_own()
        gc.disable()
        try:
            yield
            if gc.get_freeze_count() == 0:
                gc.freeze()
                self._frozen = gc.get_freeze_count()
        finally:
            if was_on:
                gc.enable()

    def give_back(self) -> None:
        """The script is over: have what may be its own collected with the rest."""
        if not self._was_first and 0 < gc.get_freeze_count() <= self._frozen:
            gc.unfreeze()

    def _has_own(self) -> bool:
        """Whether the script has made anything but imports of what is installed."""
        loaded = [name for name in list(sys.modules) if name not in self._before]
        main = sys.modules.get("__main__")
        names = {} if main is None else vars(main)
        values = [value for name, value in names.items() if not name.startswith("__")]
        return any(map(_is_own, loaded)) or not all(map(_is_installed, values))


def _is_own(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not is_library(file)


def _is_installed(value: Any) -> bool:
    """Whether what a script calls by a name was there to be imported, or holds nothing."""
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return not _is_own(module := module_name(value)) and module != "__main__"
    return isinstance(value, (ModuleType, *_ATOMS)) or type(value).__module__ in _SPEECH
