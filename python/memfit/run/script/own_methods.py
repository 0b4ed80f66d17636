"""Methods beside ``step`` that an optimizer of the script's own has.

SAM's ``first_step`` copies all parameters and changes them, before the pass whose gradients its
``second_step`` uses. Responsible for standing in for such methods of each class, and for putting
them back. Not responsible for what they are told for (:mod:`memfit.run.script.foreign_optimizers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch.optim import Optimizer


class OwnMethods:
    """The methods of all classes seen so far."""

    def __init__(
        self, standing_in: Callable[[str, Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Stand in for none yet.

        Args:
            standing_in: Makes of a method, and its name, what stands in for it.
        """
        self._standing_in = standing_in
        self._originals: list[tuple[type, str, Any, Any]] = []

    def watch(self, kind: type[Optimizer]) -> None:
        """Stand in for the methods of a class, and of those that it is made from.

        Args:
            kind: The class of an optimizer.
        """
        for owner, name, method in list(_own(kind)):
            if (owner, name) not in {(of, known) for of, known, _, _ in self._originals}:
                stand_in = self._standing_in(name, method)
                setattr(owner, name, stand_in)
                self._originals.append((owner, name, method, stand_in))

    def remove(self) -> None:
        """Put everything back that is as it was left."""
        while self._originals:
            owner, name, method, stand_in = self._originals.pop()
            if vars(owner).get(name) is stand_in:
                setattr(owner, name, method)


def _own(kind: type[Optimizer]) -> Iterator[tuple[type, str, Any]]:
    for owner in kind.__mro__:
        if not issubclass(owner, Optimizer) or owner.__module__.split(".")[0] == "torch":
            continue
        for name, value in vars(owner).items():
            is_method = isinstance(value, FunctionType) and not name.startswith("_")
            if is_method and not hasattr(Optimizer, name):
                yield owner, name, value
