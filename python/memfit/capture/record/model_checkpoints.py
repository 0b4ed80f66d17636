"""The checkpoints of a model whose step is recorded: how many run, and whether they may be undone.

Responsible for saying why an ordinary forward of their bodies might compute something else than
they do, and for running them so where the step is recorded without its checkpoints. Not responsible
for finding side effects of a function (:mod:`memfit.capture.record.effects`), nor for the choice,
which is the plan's.

A checkpoint runs its body twice, in forward and in backward; an ordinary forward runs it once. So
the body may do nothing but compute, and what it reads must be the same both times.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from memfit.capture.record.checkpoints import Checkpoint, Checkpoints
from memfit.capture.record.effects import Look, Shows
from memfit.capture.record.recorder import FORWARD, OpRecord, Recorder


@dataclass(slots=True)
class _Ran:
    """A checkpoint that ran in forward; nothing of what it was given, which would stay in memory.

    Attributes:
        reentrant: Whether it has a graph of its own.
        keeps_random_state: Whether its body draws the same random numbers again.
        start: The first op of its body.
        end: The op after its last.
    """

    reentrant: bool
    keeps_random_state: bool
    start: int
    end: int


@dataclass(slots=True)
class _Meeting:
    undone: bool
    ended: Callable[[], None]


@dataclass(slots=True)
class ModelCheckpoints:
    """The checkpoints of a step that is being recorded.

    Attributes:
        recorder: Records it.
        undone: Whether their bodies run as ordinary forwards.
    """

    recorder: Recorder
    undone: bool = False
    _ran: list[_Ran] = field(default_factory=list)
    _refusal: str = ""
    _shows: Shows | None = None
    _thread: int = field(default_factory=threading.get_ident)

    @contextlib.contextmanager
    def met(self) -> Iterator[None]:
        """Meet those that run inside this."""
        standing = Checkpoints(self._met)
        standing.install()
        try:
            yield
        finally:
            standing.remove()

    @property
    def count(self) -> int:
        """How many ran."""
        return len(self._ran)

    def refusal(self, parameters: AbstractSet[int]) -> str:
        """Why they may not be undone, as a clause about one; empty where they may.

        Args:
            parameters: Allocations of the model's parameters.
        """
        reasons = (self._refusal_of(ran, parameters) for ran in self._ran)
        return self._refusal or next(filter(None, reasons), "")

    def _met(self, seen: Checkpoint) -> _Meeting | None:
        if threading.get_ident() != self._thread:
            self._refusal = self._refusal or "it runs on a thread of its own"
            return None
        self._refusal = self._refusal or seen.refusal
        given = (seen.args, seen.kwargs)
        before = Look(seen.body, given)
        own = Shows() if self._shows is None else None  # of one inside another the outer one looks
        self._shows = shows = self._shows or own
        start = self.recorder.ledger.now

        def ended() -> None:
            assert shows is not None
            if own is not None:
                own.end()
                self._shows = None
            effect = shows.found or before.difference(Look(seen.body, given))
            if not effect and seen.reentrant and before.graphs:
                effect = "it uses a tensor with a graph that is not among its arguments"
            self._refusal = self._refusal or effect
            end = self.recorder.ledger.now
            self._ran.append(_Ran(seen.reentrant, seen.keeps_random_state, start, end))

        return _Meeting(undone=self.undone and not seen.refusal, ended=ended)

    def _refusal_of(self, ran: _Ran, parameters: AbstractSet[int]) -> str:
        """What the ops of a body, and those after it, say against an ordinary forward."""
        recorder = self.recorder
        body, later = recorder.ops[ran.start : ran.end], recorder.ops[ran.end :]
        effect = next(filter(None, (self._effect_of(op, ran) for op in body)), "")
        if effect:
            return effect
        read = {allocation for op in body for allocation in self._outside(op, ran)}
        if any(op.phase is FORWARD and read & set(self._allocations(op.writes)) for op in later):
            return "what it reads is written to before backward"
        # With reentrance each body adds its gradient to a parameter's by itself; an ordinary
        # forward adds them up first.
        own = read & parameters if ran.reentrant else set()
        elsewhere = (op for op in (*recorder.ops[: ran.start], *later) if op.phase is FORWARD)
        if any(own & set(self._allocations(op.reads)) for op in elsewhere):
            return "it has a graph of its own and shares a parameter with other parts"
        return ""

    def _effect_of(self, op: OpRecord, ran: _Ran) -> str:
        """The side effect of an op of a body, as a clause; empty for none."""
        if op.random and not op.replayable:
            return "it draws random numbers from a generator of its own"
        if (op.random or op.operator.unknown) and not ran.keeps_random_state:
            return "it draws other random numbers in backward"
        written = set(self._allocations(op.writes))
        if op.hidden_writes or not written.isdisjoint(self._outside(op, ran)):
            return f"it writes to what it is given or holds (`{op.operator.name}`)"
        return ""

    def _outside(self, op: OpRecord, ran: _Ran) -> Iterator[int]:
        """Allocations that an op uses and the body did not make."""
        for allocation in self._allocations((*op.reads, *op.writes)):
            producer = self.recorder.ledger.producer[allocation]
            if producer is None or not ran.start <= producer < ran.end:
                yield allocation

    def _allocations(self, values: Iterable[int]) -> Iterator[int]:
        return (self.recorder.ledger.values[value][0] for value in values)
