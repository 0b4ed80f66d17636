"""What a recorded step leaves behind, and where in the next one it goes.

A script holds the results of a step in variables until the next step writes to them: the model's
output until the model was called again, a loss until there is another. A graph that backward was
told to retain goes with the variable that holds it. All of it is in memory while the next step runs
forward, up to some op.

Responsible for watching that while the next step is recorded, and for what follows for the step
after it. Not responsible for what else the script holds (:mod:`memfit.run.script.outside`), nor for
what a plan makes of it (:mod:`memfit.run.script.recorded_step`).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from memfit.capture.record.ledger import Ledger
from memfit.capture.record.saves import Token

Passing = tuple[tuple[int, int], ...]
"""Bytes that are there when a step begins, each with the op before which they go."""

BACKWARD_BEGINS = -1
"""Stands for the first op after forward, where the op itself is not known."""

_FEW_BYTES = 4096


class Remains:
    """What one step left."""

    def __init__(
        self,
        storages: Iterable[torch.UntypedStorage],
        graphs: Iterable[tuple[int, Sequence[Token]]],
    ) -> None:
        """Know what is left; nothing of it is kept alive.

        Args:
            storages: What variables hold.
            graphs: Sizes of what graphs hold, with the tokens that stand for it.
        """
        self._next: Ledger | None = None
        self._watched: list[weakref.ref[Any]] = []
        self._sizes: list[int] = []
        self._places: dict[int, int] = {}
        self._tokens: Counter[int] = Counter()
        self._went: defaultdict[int, list[int]] = defaultdict(list)
        for storage in storages:
            if storage.nbytes() >= _FEW_BYTES:
                self._places[len(self._sizes)] = storage._cdata
                self._watch(storage.nbytes(), [storage])
        self._variables = len(self._sizes)
        for size, tokens in graphs:
            if size >= _FEW_BYTES:
                self._watch(size, tokens)

    @property
    def graph_bytes(self) -> int:
        """Bytes that graphs keep still, as of a backward that retains them.

        A recording has them elsewhere, and steps that run otherwise in memory. Those of a pass
        whose backward comes after another optimizer's step are gone once the next one begins.
        """
        of_graphs = range(self._variables, len(self._sizes))
        return sum(self._sizes[number] for number in of_graphs if self._tokens[number] > 0)

    @property
    def left_bytes(self) -> int:
        """Bytes that variables hold still."""
        return sum(self._sizes[number] for number in self._places if self._tokens[number] > 0)

    @property
    def all_bytes(self) -> int:
        """Bytes of all that is still there."""
        return sum(size for number, size in enumerate(self._sizes) if self._tokens[number] > 0)

    def next_begins(self, ledger: Ledger) -> None:
        """The next step is recorded from here on.

        Args:
            ledger: Knows which op runs.
        """
        self._next = ledger

    def went(self) -> dict[int, list[int]]:
        """Where what was left went in the next step, which is over: by size, in ascending order."""
        self._next = None
        return {size: sorted(places) for size, places in self._went.items()}

    def passing(self, went: dict[int, list[int]]) -> Passing:
        """What is there now and goes in the step to come, if that is like the one before.

        Args:
            went: Where what the step before left went in this one. Of several things of one size
                the last ones count.
        """
        waiting = {size: list(places) for size, places in went.items()}
        found: Counter[int] = Counter()
        for number, size in enumerate(self._sizes):
            if self._tokens[number] > 0 and waiting.get(size):
                found[waiting[size].pop()] += size
        return tuple((size, place) for place, size in sorted(found.items()))

    def _watch(self, size: int, holders: Sequence[Any]) -> None:
        number = len(self._sizes)
        self._sizes.append(size)
        self._tokens[number] = len(holders)
        for holder in holders:
            self._watched.append(weakref.ref(holder, lambda _: self._gone(number)))

    def _gone(self, number: int) -> None:
        self._tokens[number] -= 1
        ledger = self._next
        if self._tokens[number] > 0 or ledger is None or ledger.closing:
            return
        # What the next step has read is in its own trace.
        if self._places.get(number) not in ledger.found:
            self._went[self._sizes[number]].append(ledger.now)
