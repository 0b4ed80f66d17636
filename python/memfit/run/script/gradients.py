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
_OWN = (
    _TORCH / "optim",
    _TORCH / "nn" / "modules",
    _TORCH / "_subclasses",  # makes fakes of parameters, for memfit
    Path(__file__).parents[2],
)
_SLOT: Any = Tensor.grad


class GradientLooks:
    """Told of looks at gradients while it is installed; there may be several.

    Attributes:
        by_others: Whether code that is not torch's own has looked since :meth:`begin`.
        on_look: Told of each look of others, in the middle of it; ``None`` for nobody.
        on_read: Told of each look of anyone, likewise.
        on_clear: Told of each gradient that ``zero_grad()`` clears, by its parameter.
    """

    def __init__(self) -> None:
        """Be told of nothing yet."""
        self.by_others = False
        self.on_look: Callable[[Tensor], None] | None = None
        self.on_read: Callable[[Tensor], None] | None = None
        self.on_clear: Callable[[Tensor], None] | None = None

    def install(self) -> None:
        """Be told from here on."""
        if self not in _LOOKS:
            _LOOKS.append(self)
        if "grad" not in vars(nn.Parameter):
            nn.Parameter.grad = property(_get, _set, _delete)  # type: ignore[assignment]

    def remove(self) -> None:
        """Be told no more; with the last, torch's own is seen again."""
        if self in _LOOKS:
            _LOOKS.remove(self)
            if not _LOOKS:
                del nn.Parameter.grad

    def begin(self) -> None:
        """Nobody has looked from here on."""
        self.by_others = False


_LOOKS: list[GradientLooks] = []
_KINDS: dict[CodeType, str] = {}


def _get(parameter: nn.Parameter) -> Any:
    _seen(parameter)
    return _SLOT.__get__(parameter)


def _set(parameter: nn.Parameter, gradient: Any) -> None:
    _seen(parameter)
    _SLOT.__set__(parameter, gradient)


def _delete(parameter: nn.Parameter) -> None:
    _seen(parameter)
    _SLOT.__delete__(parameter)


def _seen(parameter: Tensor) -> None:
    for looks in _LOOKS:
        if looks.on_read is not None:
            looks.on_read(parameter)
    code = sys._getframe(2).f_code
    kind = _KINDS.get(code)
    if kind is None:
        file = Path(code.co_filename)
        own = any(folder in file.parents for folder in _OWN)
        kind = "other" if not own else "zero" if code.co_name == "zero_grad" else "own"
        _KINDS[code] = kind
    for looks in list(_LOOKS) if kind != "own" else ():
        if kind == "zero":
            if looks.on_clear is not None:
                looks.on_clear(parameter)
            continue
        looks.by_others = True
        if looks.on_look is not None:
            looks.on_look(parameter)
