"""Calls of a module's ``forward`` itself, which ``nn.Module.__call__`` does not see.

Responsible for noticing them where the script makes any: ``self.forward(x)``, ``net.forward(x)``.
Not responsible for what a call of a module means (:mod:`memfit.run.script.signals`).

Only classes of the script's own that its code calls this way are touched, when the first of their
instances is made, and none in scripts that hand models to a compiler, which reads ``forward``.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from memfit.libraries import is_library

Call = Callable[..., Any]

_DIRECT = re.compile(r"(?<!super\(\))\.forward\(")
_COMPILER = re.compile(r"\btorch\.(compile|jit|fx|export)\b")


class DirectCalls:
    """Stands in for ``forward`` of the script's own classes."""

    def __init__(self, calling: Callable[[Call], Call]) -> None:
        """Stand in for nothing yet.

        Args:
            calling: Of a function that calls a module, what does the same and tells of it.
        """
        self._calling = calling
        self._known: set[type] = set()
        self._undo: list[Callable[[], None]] = []
        self._is_called: dict[str, bool] = {}

    def install(self) -> None:
        """Look at every module that is made from now on."""
        original: Any = nn.Module.__init__

        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._look_at(type(module))
            original(module, *args, **kwargs)

        self._replace(nn.Module, "__init__", original, init)

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _look_at(self, kind: type) -> None:
        if kind in self._known:
            return
        self._known.add(kind)
        for base in kind.__mro__:
            original = vars(base).get("forward")
            if isinstance(original, FunctionType) and self._calls_directly(base.__module__):
                self._stand_in(base, original)

    def _calls_directly(self, module: str) -> bool:
        """Whether the file of a class, or the script, calls ``forward`` itself."""
        if module not in self._is_called:
            texts = [_own_text(name) for name in {module, "__main__"}]
            is_own = bool(_own_text(module))
            calls = any(_DIRECT.search(text) for text in texts)
            compiles = any(_COMPILER.search(text) for text in texts)
            self._is_called[module] = is_own and calls and not compiles
        return self._is_called[module]

    def _stand_in(self, kind: type, original: FunctionType) -> None:
        self._replace(kind, "forward", original, self._calling(original))

    def _replace(self, kind: type, name: str, original: Any, stand_in: Any) -> None:
        setattr(kind, name, stand_in)

        def put_back() -> None:
            if vars(kind).get(name) is stand_in:
                setattr(kind, name, original)

        self._undo.append(put_back)


def _own_text(module: str) -> str:
    """The code of a module that belongs to the script; empty for others."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return ""
    path = Path(file)
    if is_library(file) or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")
