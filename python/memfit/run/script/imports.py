"""What imports of libraries leave in memory, and the garbage collector.

Responsible for keeping the collector away from it: importing torch makes some 250,000 objects that
live as long as the process, and `transformers` half as many again. Every full collection looks at
all of them again, and the last one, at the end, takes longer than all others. Not responsible for
seeing that torch is imported (:mod:`memfit.run.script.summary`).

The script's own objects are collected as ever, but for those that were there before torch. Where
there were any, all are the collector's again at the end: what the last collection lets go of, such
as a file with bytes still to be written, is the script's. After torch, imports are left alone for
as long as the script has done nothing but import, and no library is there that counts at the end
what was not collected.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from memfit.libraries import is_library, module_name
from memfit.tensors.garbage import collected_once

_ATOMS = (str, bytes, int, float, complex, type(None))
_SPEECH = ("__future__", "typing")
"""Modules whose objects are words of the language."""


class Imported:
    """The objects of imports, out of the collector's sight."""

    def __init__(self) -> None:
        """Know which modules are there before the script begins."""
        self._known = set(sys.modules)
        self._frozen = 0
        self._was_first = False
        self._libraries: _Libraries | None = None

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

    def go_on(self, before: Callable[[], None]) -> None:
        """Leave alone what is imported after torch, until the script has something of its own.

        Args:
            before: Called before objects are put out of the collector's sight.
        """
        if self._was_first and gc.isenabled():
            self._libraries = _Libraries(self._has_own, before)
            sys.meta_path.insert(0, self._libraries)

    def give_back(self) -> None:
        """The script is over: have what may be its own collected with the rest."""
        if self._libraries is not None:
            self._libraries.remove()
        if not self._was_first and 0 < gc.get_freeze_count() <= self._frozen:
            gc.unfreeze()

    def _has_own(self) -> bool:
        """Whether the script has made anything but imports of what is installed."""
        main = sys.modules.get("__main__")
        loaded = sys.modules.keys() - self._known
        # The script is `__mp_main__`, too, where it may start processes.
        if any(sys.modules.get(name) is not main and _is_own(name) for name in loaded):
            return True
        self._known |= loaded
        names = {} if main is None else vars(main)
        values = [value for name, value in names.items() if not name.startswith("__")]
        return not all(map(_is_installed, values))


class _Libraries:
    """A finder that leaves each library alone while it is imported, with all that it imports."""

    def __init__(self, has_own: Callable[[], bool], before: Callable[[], None]) -> None:
        self._has_own = has_own
        self._before = before
        self._thread = threading.get_ident()
        self._is_inside = False

    def remove(self) -> None:
        """Find nothing more."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a library as ever, and leave it alone while it is loaded."""
        if self._is_inside or threading.get_ident() != self._thread:
            return None
        if self._has_own() or _counts_leaks():
            self.remove()
            return None
        spec = self._found(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not _is_far(spec.origin):
            return spec
        load = spec.loader.exec_module

        def load_alone(module: ModuleType) -> None:
            self._is_inside = True
            was_on = gc.isenabled()
            try:
                with collected_once():
                    load(module)
                    if was_on and not self._has_own() and not _counts_leaks():
                        self._before()
                        gc.freeze()
            finally:
                self._is_inside = False

        spec.loader.exec_module = load_alone  # type: ignore[method-assign]
        return spec

    def _found(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """What the first of the other finders finds, as without this one."""
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None


def _counts_leaks() -> bool:
    """Whether a library is there that says at the end what of its own was not let go of.

    All that are made with nanobind do, as Triton is, and their classes are of a class of its own.
    """
    return any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type))


def _is_far(origin: str | None) -> bool:
    return origin is not None and is_library(origin)


def _is_own(module: str) -> bool:
    # What a package has put in the place of a module may name no file, or none that is one.
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    return isinstance(file, str) and not is_library(file)


def _is_installed(value: Any) -> bool:
    """Whether what a script calls by a name was there to be imported, or holds nothing."""
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return not _is_own(module := module_name(value)) and module != "__main__"
    return isinstance(value, (ModuleType, *_ATOMS)) or type(value).__module__ in _SPEECH
