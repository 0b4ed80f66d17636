"""Who looks at the gradients of parameters, in Python.

Responsible for seeing every read and write of ``parameter.grad``, and for telling torch's own, in
optimizers and ``zero_grad()``, from others'. Not responsible for what follows
(:mod:`memfit.run.script.fused`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

_TORCH = Path(torch.__file__).parent
_OWN = (_TORCH / "optim", _TORCH / "nn" / "modules", Path(__file__).parents[2])
_SLOT: Any = Tensor.grad


class GradientLooks:
    """Stands in for ``nn.Parameter.grad``.

    Attributes:
        cleared: Whether ``zero_grad()`` was called since :meth:`begin`.
        by_others: Whether code that is not torch's own has looked since then.
    """

    def __init__(self) -> None:
        """Stand in for nothing yet."""
        self.cleared = False
        self.by_others = False
        self.on_look: Callable[[Tensor], None] | None = None
        self._kinds: dict[CodeType, str] = {}
        self._installed = False

    def install(self) -> None:
        """Stand in."""
        if not self._installed:
            self._installed = True
            nn.Parameter.grad = property(self._get, self._set, self._delete)  # type: ignore[assignment]

    def remove(self) -> None:
        """Let torch's own be seen again."""
        if self._installed:
            self._installed = False
            del nn.Parameter.grad

    def begin(self) -> None:
        """Nobody has looked from here on."""
        self.cleared = self.by_others = False

    def _get(self, parameter: nn.Parameter) -> Any:
        self._seen(parameter)
        return _SLOT.__get__(parameter)

    def _set(self, parameter: nn.Parameter, gradient: Any) -> None:
        self._seen(parameter)
        _SLOT.__set__(parameter, gradient)

    def _delete(self, parameter: nn.Parameter) -> None:
        self._seen(parameter)
        _SLOT.__delete__(parameter)

    def _seen(self, parameter: Tensor) -> None:
        code = sys._getframe(2).f_code
        kind = self._kinds.get(code)
        if kind is None:
            file = Path(code.co_filename)
            own = any(folder in file.parents for folder in _OWN)
            kind = "other" if not own else "zero" if code.co_name == "zero_grad" else "own"
            self._kinds[code] = kind
        if kind == "zero":
            self.cleared = True
        elif kind == "other":
            self.by_others = True
            if self.on_look is not None:
                self.on_look(parameter)
