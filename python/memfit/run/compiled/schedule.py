"""The order in which forward and backward run under a decision, and what that takes.

Responsible for one meaning of a decision on a joint graph: which ops run in forward, which tensors
are saved, which of these are elsewhere meanwhile, which ops of forward run again in backward, when
and how often; and for the peak of both by liveness of storages. It is the meaning that
``docs/concepts/transformed-trace.md`` gives to dropped allocations and homes, read for a graph: an
op of backward that asks for a tensor that is not there has it computed, or brought back, just
before. Not responsible for choosing (:mod:`memfit.run.compiled.search`) or for fx
(:mod:`memfit.run.compiled.partition`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.run.compiled.inductor.fusion import lives as fused_lives
from memfit.run.compiled.inductor.fusion import most
from memfit.run.compiled.inductor.loops import Loops
from memfit.run.compiled.joint import Joint

WINDOW = 2
"""How many of the largest tensors that leave may be on their way out at a time."""


@dataclass(slots=True, frozen=True)
class Decision:
    """What backward computes again, and what is elsewhere until backward wants it.

    Attributes:
        dropped: Storages of forward that are not kept for backward.
        homes: Of some of them, the op of forward from which on requests for what that op or a later
            one makes let them pass: they are computed for the request and let go.
    """

    dropped: frozenset[int]
    homes: Mapping[int, int] = field(default_factory=dict)
    away: frozenset[int] = frozenset()
    """Storages of forward that are kept for backward in a file or in the host's memory."""


KEEP_ALL = Decision(frozenset())


@dataclass(slots=True)
class Call:
    """One op as backward runs it, or a tensor that comes back.

    Attributes:
        op: The op of the joint graph; -1 for a tensor that comes back.
        reads: Of each tensor it reads, the call that made it; ``None`` for an input of backward.
        fetched: The tensor that comes back.
    """

    op: int
    reads: list[int | None]
    fetched: int | None = None


@dataclass(slots=True, frozen=True)
class Settled:
    """Where forward waits for a tensor on its way out, which can be let go afterwards.

    Attributes:
        tensor: The tensor.
        position: The call of forward that has just run; as many as there are for its end.
    """

    tensor: int
    position: int


@dataclass(slots=True)
class Schedule:
    """A step of a joint graph under a decision.

    Attributes:
        forward: Ops of forward that run, in order.
        saved: Tensors that forward hands to backward, inputs of the graph not among them.
        inputs: Inputs of the graph that backward reads, as tensors.
        calls: Backward.
        outputs: For each tensor that backward returns, the call that made it.
        settled: Tensors that leave in forward and come back in backward, in the order of forward.
        window_bytes: Most bytes of them on their way out at a time.
        forward_peak_bytes: Peak of forward, the graph's inputs included.
        backward_peak_bytes: Peak of backward; inputs and outputs of forward included.
        saved_bytes: Bytes of the saved storages that stay.
        away_bytes: Bytes of those that do not.
        recomputed: Ops of forward that run in backward, each as often as it does.
    """

    forward: list[int]
    saved: list[int]
    inputs: list[int]
    calls: list[Call]
    outputs: list[int | None]
    settled: list[Settled] = field(default_factory=list)
    window_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    saved_bytes: int = 0
    away_bytes: int = 0
    recomputed: list[int] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The larger of both peaks."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def fetched(self, position: int) -> int:
        """The tensor that a call brings back."""
        tensor = self.calls[position].fetched
        assert tensor is not None, "the call runs an op"
        return tensor


def schedule(joint: Joint, decision: Decision) -> Schedule:
    """Lay a decision out and evaluate it.

    Args:
        joint: The graph.
        decision: What is dropped; storages that cannot be are kept.

    Returns:
        The schedule with its peaks.
    """
    backward = _Backward(joint, decision)
    backward.run()
    saved = sorted(backward.saved)
    made = Schedule(
        _forward_ops(joint, saved), saved, sorted(backward.inputs), backward.calls, backward.outputs
    )
    _let_leave(joint, made, backward.away)
    storages = {joint.tensors[t].storage for t in saved}
    made.away_bytes = sum(joint.storages[s].bytes for s in storages & backward.away)
    made.saved_bytes = sum(joint.storages[s].bytes for s in storages - backward.away)
    made.recomputed = [
        c.op for c in made.calls if c.fetched is None and not joint.ops[c.op].backward
    ]
    made.forward_peak_bytes = _forward_peak(joint, made)
    made.backward_peak_bytes = _backward_peak(joint, made)
    return made


def fused_peak_bytes(joint: Joint, made: Schedule) -> int:
    """The larger peak of forward and backward as Inductor runs them, by its model.

    Args:
        joint: The graph.
        made: A schedule of it.
    """
    # Where the model finds no better order than the schedule's, Inductor does not fuse either:
    # it is told to raise no peak.
    return max(
        min(made.forward_peak_bytes, _fused_forward_peak(joint, made)),
        min(made.backward_peak_bytes, _fused_backward_peak(joint, made)),
    )


class _Backward:
    """Runs backward on paper: each op of it, and before it what it asks for."""

    def __init__(self, joint: Joint, decision: Decision) -> None:
        self._joint = joint
        self._homes = decision.homes
        droppable = set(joint.droppable())
        self._dropped = decision.dropped & droppable
        self.away = decision.away - self._dropped
        self._there: dict[int, int] = {}
        self.calls: list[Call] = []
        self.saved: set[int] = set()
        self.inputs: set[int] = set()
        self.outputs: list[int | None] = []

    def run(self) -> None:
        joint = self._joint
        for index in range(joint.forward_end, len(joint.ops)):
            op = joint.ops[index]
            reads = [self._ask(tensor) for tensor in op.reads]
            self._emit(index, reads, self._there)
        for tensor in joint.backward_outputs:
            self.outputs.append(self._ask(tensor))

    def _emit(self, index: int, reads: list[int | None], there: dict[int, int]) -> None:
        for tensor in self._joint.ops[index].returns:
            there[tensor] = len(self.calls)
        self.calls.append(Call(index, reads))

    def _ask(self, tensor: int) -> int | None:
        """The call that makes a tensor, which runs now if it has not; ``None`` for an input."""
        found = self._there.get(tensor)
        if found is not None:
            return found
        if self._is_input(tensor):
            return self._fetch(tensor)
        asked = self._joint.tensors[tensor].op
        passing: dict[int, int] = {}
        for index in self._missing(tensor):
            op = self._joint.ops[index]
            reads = [
                self._there.get(read, passing.get(read))
                if not self._is_input(read)
                else self._fetch(read)
                for read in op.reads
            ]
            there = passing if self._passes(index, asked) else self._there
            self._emit(index, reads, there)
        return self._there.get(tensor, passing.get(tensor))

    def _fetch(self, tensor: int) -> int | None:
        """The call that brings back what backward gets handed; ``None`` where it is there."""
        found = self._there.get(tensor)
        if found is None and self._joint.tensors[tensor].storage in self.away:
            found = self._there[tensor] = len(self.calls)
            self.calls.append(Call(-1, [], tensor))
        return found

    def _is_input(self, tensor: int) -> bool:
        """Whether backward gets a tensor handed; notes what it thereby takes."""
        it = self._joint.tensors[tensor]
        if it.op < 0:
            self.inputs.add(tensor)
            return True
        if it.fresh and it.storage not in self._dropped and not self._joint.ops[it.op].backward:
            self.saved.add(tensor)
            return True
        return False

    def _missing(self, tensor: int) -> list[int]:
        """Ops of forward that must run so that a tensor is there, in order."""
        tensors, found, stack = self._joint.tensors, set(), [tensor]
        while stack:
            one = stack.pop()
            if one in self._there or self._is_input(one):
                continue
            op = tensors[one].op
            if op not in found:
                found.add(op)
                stack.extend(self._joint.ops[op].reads)
        return sorted(found)

    def _passes(self, index: int, asked: int) -> bool:
        """Whether an op's results go with the request: all their homes are behind it."""
        if index == asked:
            return False
        storages = {self._joint.tensors[t].storage for t in self._joint.ops[index].returns}
        return bool(storages) and all(
            self._homes.get(storage, asked + 1) <= asked for storage in storages
        )


def _forward_ops(joint: Joint, saved: list[int]) -> list[int]:
    """Ops that forward runs: what leads to its outputs, to saved tensors and to writes."""
    needed: set[int] = set()
    stack = [index for index, op in enumerate(joint.ops) if op.root]
    stack += [joint.tensors[t].op for t in (*joint.forward_outputs, *saved)]
    while stack:
        index = stack.pop()
        if index < 0 or index in needed:
            continue
        needed.add(index)
        stack.extend(joint.tensors[t].op for t in joint.ops[index].reads)
    return sorted(needed)


def _let_leave(joint: Joint, made: Schedule, away: frozenset[int]) -> None:
    """Have forward wait for what leaves: oldest first when the window is full, or at its end."""
    position = {index: at for at, index in enumerate(made.forward)}
    leaving = [t for t in made.saved if joint.tensors[t].storage in away]
    leaving.sort(key=lambda t: position[joint.tensors[t].op])
    sizes = {t: joint.storages[joint.tensors[t].storage].bytes for t in leaving}
    made.window_bytes = WINDOW * max(sizes.values(), default=0)
    settled = made.settled
    outstanding = 0
    for tensor in leaving:
        while outstanding + sizes[tensor] > made.window_bytes:
            oldest = leaving[len(settled)]
            outstanding -= sizes[oldest]
            settled.append(Settled(oldest, position[joint.tensors[tensor].op]))
        outstanding += sizes[tensor]
    end = len(made.forward)
    settled.extend(Settled(tensor, end) for tensor in leaving[len(settled) :])


def _arriving(made: Schedule) -> dict[int, list[int]]:
    """The calls that bring a tensor back, by the call that begins it.

    Each begins the one after it, so that it arrives while the calls between them run.
    """
    fetches = [position for position, call in enumerate(made.calls) if call.fetched is not None]
    found: dict[int, list[int]] = defaultdict(list)
    for position, after in pairwise(fetches):
        found[position].append(after)
    if fetches:
        found[fetches[0]].insert(0, fetches[0])
    return found


def _forward_peak(joint: Joint, made: Schedule) -> int:
    tensors, storages = joint.tensors, joint.storages
    last: dict[int, int] = {}
    for position, index in enumerate(made.forward):
        op = joint.ops[index]
        for tensor in (*op.reads, *op.returns):
            last[tensors[tensor].storage] = position
    settled = {at.tensor: at.position for at in made.settled}
    for tensor in (*made.saved, *joint.forward_outputs):
        storage = tensors[tensor].storage
        end = settled.get(tensor, len(made.forward))
        last[storage] = max(last.get(storage, end), end)
    sizes = {storage: storages[storage].bytes for storage in last if storages[storage].op >= 0}
    births: dict[int, int] = {}
    for position, index in enumerate(made.forward):
        for tensor in joint.ops[index].returns:
            births.setdefault(tensors[tensor].storage, position)
    lives = [(births[s], last[s], size) for s, size in sizes.items() if s in births]
    return joint.input_bytes + most(lives, len(made.forward))


def _held_outputs(joint: Joint) -> set[int]:
    """Storages that forward made and returned, and that are there throughout backward."""
    returned = {joint.tensors[t].storage for t in joint.forward_outputs}
    return {s for s in returned - joint.released if joint.storages[s].op >= 0}


def _backward_peak(joint: Joint, made: Schedule) -> int:
    storages = joint.storages
    held = _held_outputs(joint)
    outputs = sum(storages[s].bytes for s in held)
    lives = _Lives(joint, without=held)
    away = {at.tensor for at in made.settled}
    lives.start([t for t in made.saved if t not in away])
    arriving = _arriving(made)
    for position, call in enumerate(made.calls):
        for arrival in arriving[position]:
            lives.arrive(position, made.fetched(arrival), arrival)
        if call.fetched is None:
            lives.run(position, call)
    lives.end(made.outputs, len(made.calls))
    inputs = joint.input_bytes + joint.tangent_bytes
    return inputs + outputs + most(lives.rows, len(made.calls))


def _fused_forward_peak(joint: Joint, made: Schedule) -> int:
    position = {index: at for at, index in enumerate(made.forward)}
    calls = [
        Call(index, [position.get(joint.tensors[t].op) for t in joint.ops[index].reads])
        for index in made.forward
    ]
    loops = Loops(joint, ())
    settled = defaultdict(list)
    for at in made.settled:
        settled[at.position].append(at.tensor)
    for at_position, call in enumerate(calls):
        loops.run(call.op, call.reads)
        for tensor in settled[at_position]:
            loops.waits(tensor, position.get(joint.tensors[tensor].op))
    for tensor in settled[len(calls)]:
        loops.waits(tensor, position.get(joint.tensors[tensor].op))
    away = {at.tensor for at in made.settled}
    for tensor in (*joint.forward_outputs, *(t for t in made.saved if t not in away)):
        loops.returns(tensor, position.get(joint.tensors[tensor].op))
    return joint.input_bytes + most(*fused_lives(loops.calls, loops.results))


def _fused_backward_peak(joint: Joint, made: Schedule) -> int:
    outputs = _held_outputs(joint)
    saved = {joint.tensors[t].storage for t in made.saved}
    loops = Loops(joint, saved - outputs)
    arriving = _arriving(made)
    for position, call in enumerate(made.calls):
        for arrival in arriving[position]:
            loops.arrives(made.fetched(arrival), arrival)
        if call.fetched is None:
            loops.run(call.op, call.reads)
        else:
            loops.skip()
    for tensor, source in zip(joint.backward_outputs, made.outputs, strict=True):
        loops.returns(tensor, source)
    besides = joint.input_bytes + joint.tangent_bytes
    besides += sum(joint.storages[s].bytes for s in outputs)
    return besides + most(*fused_lives(loops.calls, loops.results))


class _Lives:
    """Who is there when in backward: a storage lives from its call to the last that reads it."""

    def __init__(self, joint: Joint, without: set[int]) -> None:
        self._joint = joint
        self._without = without
        self._owner: dict[tuple[int | None, int], int] = {}
        """The row of a storage, by the call that made or looked at it."""
        self.rows: list[tuple[int, int, int]] = []

    def start(self, saved: list[int]) -> None:
        """What forward hands over is there from the start."""
        for storage in sorted({self._joint.tensors[t].storage for t in saved} - self._without):
            self._born(None, storage, 0)

    def arrive(self, position: int, tensor: int, at: int) -> None:
        """A tensor begins to come back; the call that it is there from comes later."""
        self._born(at, self._joint.tensors[tensor].storage, position)

    def run(self, position: int, call: Call) -> None:
        """One call: what it reads lives until it, what it makes from it on."""
        op, tensors = self._joint.ops[call.op], self._joint.tensors
        of_read: dict[int, int] = {}
        for tensor, source in zip(op.reads, call.reads, strict=True):
            row = self._owner.get((source, tensors[tensor].storage))
            if row is not None:
                of_read[tensors[tensor].storage] = row
                self._extend(row, position)
        for tensor in op.returns:
            storage = tensors[tensor].storage
            if tensors[tensor].fresh:
                self._born(position, storage, position)
            elif storage in of_read:
                self._owner[position, storage] = of_read[storage]

    def end(self, outputs: list[int | None], position: int) -> None:
        """What backward returns is there at its end."""
        for tensor, source in zip(self._joint.backward_outputs, outputs, strict=True):
            row = self._owner.get((source, self._joint.tensors[tensor].storage))
            if row is not None:
                self._extend(row, position)

    def _born(self, call: int | None, storage: int, position: int) -> None:
        self._owner[call, storage] = len(self.rows)
        self.rows.append((position, position, self._joint.storages[storage].bytes))

    def _extend(self, row: int, position: int) -> None:
        birth, _, size = self.rows[row]
        self.rows[row] = (birth, position, size)
