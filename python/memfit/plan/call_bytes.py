"""What a call of a model adds to the memory that is taken, learnt on fakes at its own batch size.

Responsible for telling cheaply whether a call fits whole, so that nobody has to prove that it may
run in pieces (:mod:`memfit.plan.items_apart`, whose figures these are). Not responsible for what
follows from it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from memfit.capture.record.originals import Originals
from memfit.capture.record.recorder import RealStepNeeded, Recorder
from memfit.capture.record.step import StepRunner
from memfit.capture.stage.fake import fake_stage, ordinary_tensors, preserved_random_state
from memfit.capture.stage.stage import Stage
from memfit.errors import MemfitError
from memfit.plan.items_apart import CONVOLUTION, Called, ItemsMixedError, alive_bytes, items_to_cut
from memfit.tensors.garbage import no_collection
from memfit.tensors.operators import Operator


def call_bytes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Most bytes that a call adds to what is there before, with its backward if gradients are on.

    Autograd is taken to hold nothing, as while a step is recorded.

    Args:
        model: The model; neither it nor a random state changes.
        args: What it is called with.
        kwargs: The same.

    Returns:
        The bytes; ``None`` where fakes do not tell.

    Raises:
        ItemsMixedError: It may not run in pieces, as is known without a second recording.
    """
    given = (args, kwargs)
    items_to_cut(model, given)
    workload = Called(lambda *_: str).workload(model, given)
    try:
        with preserved_random_state(), no_collection():
            stage = fake_stage(workload)
            assert stage.fake_mode is not None, "a stage of fakes has one"
            lives = _Lives(stage)
            with stage.fake_mode, ordinary_tensors():
                StepRunner(stage, lives).run()
    except (MemfitError, RealStepNeeded) as error:
        if isinstance(error.__cause__, ItemsMixedError):
            raise error.__cause__ from None
        return None
    return lives.growth_bytes()


class _Lives(Recorder):  # type: ignore[no-untyped-call]
    """Records when allocations lived, and nothing of the ops."""

    def __init__(self, stage: Stage) -> None:
        """Record nothing yet.

        Args:
            stage: What will run.
        """
        super().__init__(stage.model, stage.fake_mode, originals=Originals(stage.workload))
        self._operands: dict[int, int] = {}

    def _write_down(
        self,
        index: int,
        func: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: list[int],
        reads: list[int],
        out: Any,
    ) -> None:
        noted = self._note_results(index, func, operator, args, kwargs, read, out)
        if operator.name.startswith(CONVOLUTION):
            sizes = self.ledger.value_bytes
            self._operands[index] = sum(sizes[value] for value in {*reads, *noted[1], *noted[2]})

    def growth_bytes(self) -> int:
        """Most bytes above what was there; convolutions are taken to need their operands again."""
        ledger = self.ledger
        lives = ((size, ledger.ranges(i)) for i, size in enumerate(ledger.bytes))
        alive = alive_bytes(ledger.now, lives)
        before = sum(size for i, size in enumerate(ledger.bytes) if ledger.producer[i] is None)
        during = (size + self._operands.get(index, 0) for index, size in enumerate(alive))
        return max(during, default=before) - before
