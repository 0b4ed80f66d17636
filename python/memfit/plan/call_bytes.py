"""What a call of a model adds to the memory that is taken, learnt on fakes at its own batch size.

Responsible for telling cheaply whether a call fits whole, so that nobody has to prove that it may
run in pieces (:mod:`memfit.plan.items_apart`, whose figures these are). Not responsible for what
follows from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit.capture.record.originals import Originals
from memfit.capture.record.recorder import RealStepNeeded, Recorder
from memfit.capture.record.step import StepRunner
from memfit.capture.stage.fake import fake_stage, ordinary_tensors, preserved_random_state
from memfit.capture.stage.stage import Stage
from memfit.errors import MemfitError
from memfit.plan.items_apart import (
    CONVOLUTION,
    Called,
    ItemsMixedError,
    alive_bytes,
    items_to_cut,
    without_frames,
)
from memfit.tensors.garbage import no_collection
from memfit.tensors.operators import Operator

_OF_NORM = torch.ops.aten.native_batch_norm.default
_TRAINS = 5
"""Where it is told whether statistics are those of the batch."""


class CallMixedError(ItemsMixedError):
    """A call that may not run in pieces, whatever may become of others of the model."""


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
        ItemsMixedError: It may not run in pieces, as is known before it runs.
        CallMixedError: The same, as is seen in its forward; the rest does not run.
    """
    given = (args, kwargs)
    items = items_to_cut(model, given)
    workload = _Whole(items).workload(model, given)
    try:
        with preserved_random_state(), no_collection():
            stage = fake_stage(workload)
            assert stage.fake_mode is not None, "a stage of fakes has one"
            lives = _Lives(stage, items)
            with stage.fake_mode, ordinary_tensors():
                StepRunner(stage, lives).run()
    except (MemfitError, RealStepNeeded) as error:
        if isinstance(error.__cause__, ItemsMixedError):
            raise without_frames(error.__cause__, error) from None
        return None
    return lives.growth_bytes()


class _Whole(Called):
    """The call, given up where what it returns shows that it may not run in pieces."""

    def __init__(self, items: int) -> None:
        super().__init__(lambda *_: str)
        self._items = items

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss among what it returns, or else something that depends on all."""
        loss = super().loss(model, batch)
        for place, shape in enumerate(self.returned):
            if place != self.loss_place and shape[:1] != (self._items,):
                message = (
                    f"it returns a tensor of shape {list(shape)}, which has no entry for each item"
                )
                raise CallMixedError(message)
        return loss


class _Lives(Recorder):  # type: ignore[no-untyped-call]
    """Records when allocations lived, and nothing of the ops."""

    def __init__(self, stage: Stage, items: int) -> None:
        """Record nothing yet.

        Args:
            stage: What will run.
            items: Items of its batch.
        """
        super().__init__(stage.model, stage.fake_mode, originals=Originals(stage.workload))
        self._operands: dict[int, int] = {}
        self._items = items

    def _record(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # For a statistic of each item, the batch is among the channels and not first.
        if func is _OF_NORM and args[_TRAINS] and args[0].shape[0] == self._items:
            message = (
                f"`{operator.name}` in `{self.modules.path}` computes a statistic over the batch"
            )
            raise CallMixedError(message)
        return super()._record(func, operator, args, kwargs)

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
