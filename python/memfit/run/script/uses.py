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
    """Forwards, calls of models and backwards under way, one inside another.

    Only inside these are parameters let go that the loops keep elsewhere. In between, whoever uses
    one has it in memory for good: a script that saves its model must find all of it. The same
    holds for code of a forward, outside of calls, that does more with one than compute.
    """

    def __init__(self) -> None:
        """Have none under way."""
        self._entered: list[tuple[contextlib.ExitStack, Nesting]] = []

    def begin(self, loops: Iterable[Loop]) -> None:
        """One begins.

        Args:
            loops: Those that may keep parameters elsewhere.
        """
        self._enter(loop.placing.in_use() for loop in loops)

    def forward_begins(self, loops: Iterable[Loop]) -> None:
        """The forward of a pass begins, in which the script may use parameters outside of calls.

        Args:
            loops: As above.
        """
        self._enter(loop.placing.in_forward() for loop in loops)

    def _enter(self, contexts: Iterable[contextlib.AbstractContextManager[None]]) -> None:
        entered = contextlib.ExitStack()
        for context in contexts:
            entered.enter_context(context)
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
