"""What is computed of rows that are gathered for edges, as a program that runs on some edges.

Responsible for running a chain of functions that treat rows one by one on a range of rows, and for
whose gradients come of that. A program holds no tensors: it is given them, so that autograd may
save them as any function's. Not responsible for which functions treat rows one by one
(:mod:`memfit.apply.slices.edge_rules`), nor for what takes the rows
(:mod:`memfit.apply.slices.edge_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Make = Callable[[list[Tensor]], Tensor]
"""Makes rows from those of each input; it holds no tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Rows of a tensor, one for each edge.

    Attributes:
        source: The tensor.
        index: Which row an edge has.
        gather: The call by which.
        wraps: Whether rows may be counted from the end.
    """

    source: Tensor
    index: Tensor
    gather: Callable[[Tensor, Tensor], Tensor]
    wraps: bool


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A tensor with a row for each edge."""

    source: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor that is the same for all edges."""

    source: Tensor


@dataclass(slots=True, eq=False)
class Rows:
    """Rows that are put off.

    Attributes:
        make: Makes them.
        inputs: What of.
        like: All of them, without memory.
        gathers: Numbers of the gathers that they are made of.
        depth: Steps from what is gathered, at most.
        is_view: Whether they show the memory of the first input's.
        real: They themselves, once somebody needed them all.
        is_taken: Whether something was computed of them in slices, whose gradient knows no whole.
    """

    make: Make
    inputs: tuple[Rows | Gathered | Cut | Kept, ...]
    like: Tensor
    gathers: frozenset[int]
    depth: int = 0
    is_view: bool = False
    real: Tensor | None = None
    is_taken: bool = False

    @property
    def row_bytes(self) -> int:
        """Size of one."""
        return self.like.numel() // max(len(self.like), 1) * self.like.element_size()

    def behind(self) -> list[Rows]:
        """Those whose memory they show, from the first on, and they themselves."""
        chain = [self]
        while chain[0].is_view and isinstance(chain[0].inputs[0], Rows):
            chain.insert(0, chain[0].inputs[0])
        return chain


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor where it enters.

    Attributes:
        place: Which of the program's tensors it is.
        index: Which is its index; ``None`` where nothing is gathered.
        gather: As of :class:`Gathered`.
        wraps: The same.
        is_cut: Whether it has a row for each edge.
    """

    place: int
    index: int | None = None
    gather: Callable[[Tensor, Tensor], Tensor] | None = None
    wraps: bool = False
    is_cut: bool = False


@dataclass(slots=True)
class Program:
    """How rows follow from tensors.

    Attributes:
        tensors: Those, each once, until :meth:`given` takes them.
        uses: Where they enter.
        width_bytes: Size of the widest row on the way.
    """

    tensors: list[Tensor] = field(default_factory=list)
    uses: list[_Use] = field(default_factory=list)
    width_bytes: int = 0
    _steps: list[tuple[Make, tuple[tuple[bool, int], ...]]] = field(default_factory=list)
    _last: dict[tuple[bool, int], int] = field(default_factory=dict)
    _result: tuple[bool, int] = (True, 0)

    @staticmethod
    def of(rows: Rows) -> Program:
        """The program by which rows are made."""
        program = Program()
        places: dict[int, int] = {}
        made: dict[int, tuple[bool, int]] = {}
        program._result = program._add(rows, places, made)
        for number, (_, sources) in enumerate(program._steps):
            program._last |= dict.fromkeys(sources, number)
        return program

    def _add(
        self,
        it: Rows | Gathered | Cut | Kept,
        places: dict[int, int],
        made: dict[int, tuple[bool, int]],
    ) -> tuple[bool, int]:
        """Where a value is found: among the uses, or among the results of steps."""
        if id(it) in made:
            return made[id(it)]

        def place(tensor: Tensor) -> int:
            if id(tensor) not in places:
                places[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            return places[id(tensor)]

        if isinstance(it, Rows):
            self.width_bytes = max(self.width_bytes, it.row_bytes)
        if isinstance(it, Rows) and it.real is None:
            sources = tuple(self._add(one, places, made) for one in it.inputs)
            self._steps.append((it.make, sources))
            found = (False, len(self._steps) - 1)
        else:
            if isinstance(it, Rows):
                assert it.real is not None, "they are there"
                use = _Use(place(it.real), is_cut=True)
            elif isinstance(it, Gathered):
                use = _Use(place(it.source), place(it.index), it.gather, it.wraps, is_cut=True)
            else:
                use = _Use(place(it.source), is_cut=isinstance(it, Cut))
            self.uses.append(use)
            found = (True, len(self.uses) - 1)
        made[id(it)] = found
        return found

    def given(self) -> list[Tensor]:
        """The tensors, which the program does not hold from then on."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def pieces(self, tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """What enters for some edges, for each use.

        Args:
            tensors: Those of the program.
            start: The first edge.
            stop: The one after the last.
        """
        found = []
        for use in self.uses:
            tensor = tensors[use.place]
            if use.index is not None and use.gather is not None:
                tensor = use.gather(tensor, tensors[use.index].narrow(0, start, stop - start))
            elif use.is_cut:
                tensor = tensor.narrow(0, start, stop - start)
            found.append(tensor)
        return found

    def rows(self, pieces: list[Tensor]) -> Tensor:
        """The rows of some edges.

        Args:
            pieces: What enters for them; it is let go as soon as may be.
        """
        made: list[Tensor | None] = []
        entered: list[Tensor | None] = list(pieces)
        pieces.clear()
        for number, (make, sources) in enumerate(self._steps):
            inputs = [(entered if is_use else made)[at] for is_use, at in sources]
            for is_use, at in sources:
                if self._last[is_use, at] == number:
                    (entered if is_use else made)[at] = None
            given = [it for it in inputs if it is not None]
            del inputs
            made.append(make(given))
            del given
        is_use, at = self._result
        found = (entered if is_use else made)[at]
        assert found is not None, "the last step's"
        return found

    def add_gradient(
        self,
        use: _Use,
        gradient: Tensor,
        tensors: Sequence[Tensor],
        found: list[Tensor | None],
        start: int,
    ) -> None:
        """Add the gradient of what entered for some edges to that of the tensor.

        Args:
            use: Where it entered.
            gradient: That.
            tensors: Those of the program.
            found: Gradients of each so far.
            start: The first of the edges.
        """
        tensor, sum_ = tensors[use.place], found[use.place]
        if not use.is_cut:
            found[use.place] = gradient if sum_ is None else sum_ + gradient
            return
        if sum_ is None:
            sum_ = found[use.place] = torch.zeros_like(tensor)
        if use.index is None:
            sum_.narrow(0, start, len(gradient)).add_(gradient)
            return
        index = tensors[use.index].narrow(0, start, len(gradient))
        if use.wraps:
            index = index.remainder(len(tensor))
        sum_.index_add_(0, index, gradient)
