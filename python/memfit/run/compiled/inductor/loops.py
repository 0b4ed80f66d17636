"""Ops of a joint graph in the order they run in, as the model of Inductor takes them.

Responsible for the translation alone: storages become results, views are looked through. Not
responsible for the model (:mod:`memfit.run.compiled.inductor.fusion`) nor for the order
(:mod:`memfit.run.compiled.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.run.compiled.inductor.fusion import Kind, Loop, Result, Running
from memfit.run.compiled.joint import Joint

_ELSEWHERE = Loop(Kind.EXTERN, 0)
"""What waits for a tensor that leaves or comes back: it needs memory, and computes nothing."""


class Loops:
    """Calls and results of a run, added op by op.

    Attributes:
        results: What the ops make, and what is handed in.
        calls: The ops.
    """

    def __init__(self, joint: Joint, handed: Iterable[int]) -> None:
        """Start with nothing run.

        Args:
            joint: The graph.
            handed: Storages that are handed in and go with their last reader; what else is handed
                in is there all along.
        """
        self._joint = joint
        self._given = set(handed)
        self._result: dict[tuple[int | None, int], int] = {}
        self.results: list[Result] = []
        self.calls: list[Running] = []
        self._position = 0
        """Calls of the schedule so far; what waits for tensors is none of them."""

    def run(self, index: int, sources: Sequence[int | None]) -> None:
        """Add an op.

        Args:
            index: The op.
            sources: Of each tensor it reads, the call that made it; ``None`` if it is handed in.
        """
        op, tensors, at = self._joint.ops[index], self._joint.tensors, len(self.calls)
        position = self.skip()
        of_read: dict[int, int] = {}
        for tensor, source in zip(op.reads, sources, strict=True):
            of_read[tensors[tensor].storage] = self._of(source, tensors[tensor].storage)
        is_view = op.loop.kind is Kind.VIEW
        if not is_view:
            for read in of_read.values():
                self.results[read].readers.add(at)
        makes: list[int] = []
        for tensor in op.returns:
            storage = tensors[tensor].storage
            if tensors[tensor].fresh:
                self._result[position, storage] = len(self.results)
                makes.append(len(self.results))
                self.results.append(Result(self._joint.storages[storage].bytes, at))
            elif storage in of_read:
                self._result[position, storage] = of_read[storage]
        reads = [] if is_view else list(of_read.values())
        self.calls.append(Running(op.loop, reads, makes))

    def skip(self) -> int:
        """Let a call of the schedule pass that runs no op; its position."""
        self._position += 1
        return self._position - 1

    def waits(self, tensor: int, source: int | None) -> None:
        """Let something besides the ops read a whole tensor, for the last time perhaps.

        Args:
            tensor: The tensor.
            source: As one of the sources in :meth:`run`.
        """
        read = self._of(source, self._joint.tensors[tensor].storage)
        self.results[read].readers.add(len(self.calls))
        self.calls.append(Running(_ELSEWHERE, [read], []))

    def arrives(self, tensor: int, position: int) -> None:
        """Let memory be taken for a tensor that comes back.

        Args:
            tensor: The tensor.
            position: The call of the schedule that it is there from; those that read it name it as
                their source.
        """
        storage = self._joint.tensors[tensor].storage
        self._result[position, storage] = len(self.results)
        self.results.append(Result(self._joint.storages[storage].bytes, len(self.calls)))
        self.calls.append(Running(_ELSEWHERE, [], [len(self.results) - 1]))

    def returns(self, tensor: int, source: int | None) -> None:
        """Let a tensor outlive the run.

        Args:
            tensor: The tensor.
            source: As one of the sources in :meth:`run`.
        """
        self.results[self._of(source, self._joint.tensors[tensor].storage)].returned = True

    def _of(self, source: int | None, storage: int) -> int:
        found = self._result.get((source, storage))
        if found is None:
            size = self._joint.storages[storage].bytes
            fixed = storage not in self._given
            found = self._result[source, storage] = len(self.results)
            self.results.append(Result(size, None, fixed=fixed))
        return found
