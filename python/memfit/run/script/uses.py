"""When parameters may be let go that loops keep elsewhere.

Responsible for calls of models and backwards under way, one inside another. Not responsible for
what is elsewhere (:mod:`memfit.run.script.placing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memfit.run.script.contexts import Nesting

if TYPE_CHECKING:
    from memfit.run.script.loop import Loop


class Uses:
    """Calls of models and backwards under way, one inside another.

    Only inside these are parameters let go that the loops keep elsewhere. In between, whoever uses
    one has it in memory for good: a script that saves its model must find all of it.
    """

    def __init__(self) -> None:
        """Have none under way."""
        self._entered: list[tuple[contextlib.ExitStack, Nesting]] = []

    def begin(self, loops: Iterable[Loop]) -> None:
        """One begins.

        Args:
            loops: Those that may keep parameters elsewhere.
        """
        entered = contextlib.ExitStack()
        for loop in loops:
            entered.enter_context(loop.placing.in_use())
        self._entered.append((entered, Nesting()))

    def end(self) -> None:
        """The one that began last is over."""
        if self._entered:
            entered, nesting = self._entered.pop()
            with nesting.cleared():
                entered.close()

    def end_all(self) -> None:
        """All are taken to be over."""
        while self._entered:
            self.end()
