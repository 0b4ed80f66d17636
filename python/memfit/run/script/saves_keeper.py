"""What autograd saves kept as a recording keeps it, with no op written down.

Responsible for what of it stays in memory: the latest, as long as there is room, since backward
asks for them first and files cost time for each. Not responsible for how much room there is
(:mod:`memfit.run.script.recorder_steps`) nor for recording
(:mod:`memfit.run.script.script_recorder`).
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from memfit import _native
from memfit.capture.stage.arguments import written_tensors
from memfit.run.script.script_recorder import Saved, ScriptRecorder, has_memory
from memfit.run.script.spill import SMALLEST, SpillFile
from memfit.tensors.operators import Operator


class SavesKeeper(ScriptRecorder):  # type: ignore[no-untyped-call]
    """Keeps what autograd saves where a recording does, or in memory, and writes no op down.

    A tensor is known from the first time that autograd saves it, as one that came with the step or
    was made in it by when its memory was allocated. So this is for the CPU alone.
    """

    def __init__(self, root: nn.Module, spill: SpillFile, most_bytes: int) -> None:
        """Keep nothing yet.

        Args:
            root: The model.
            spill: Keeps what may not stay in memory.
            most_bytes: Of all that is in memory: with more, what was saved first goes; 0 where
                nothing stays.
        """
        super().__init__(root, spill)
        self._most_bytes = most_bytes
        self._in_memory: deque[weakref.ref[Saved]] = deque()

    def holds_graph(self) -> bool:
        """Whether anything that autograd saved is still needed."""
        return super().holds_graph() or any(it() is not None for it in self._in_memory)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds instead of a tensor that it saves."""
        if not self._most_bytes:
            return super().pack(tensor)
        if self.problem or not has_memory(tensor):
            return tensor
        saved = Saved(tensor, _alias(tensor), self.saved)
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALLEST and self._came_meanwhile(storage):
            self._in_memory.append(weakref.ref(saved))  # all else stays in memory in any case
        return saved

    def pass_ended(self) -> None:
        """Move what is still needed to files: later passes make no room of it."""
        while self._in_memory:
            saved = self._in_memory.popleft()()
            if saved is not None:
                saved.goes()

    def _make_room(self) -> None:
        """Move the oldest saved tensors to files until what is live is within the limit."""
        lacking = _native.counted_bytes() - self._most_bytes
        while self._in_memory and lacking > 0:
            saved = self._in_memory.popleft()()
            if saved is not None:
                lacking -= saved.goes()

    def _record(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        saved, ledger = self.saved, self.ledger
        saved.settle_writes()
        saved.shape_saves.op(operator.name, args)
        if self._in_memory:
            self._make_room()
        self._op_is_reached = True
        ledger.now += 1
        out = func(*args, **kwargs)
        if operator.written:
            for tensor in written_tensors(operator, args, kwargs):
                if tensor.layout is torch.strided:
                    self._note_write(tensor, resizes=operator.resizes)
        return out

    def _note_write(self, tensor: Tensor, *, resizes: bool) -> None:
        ledger = self.ledger
        allocation = ledger.find(tensor)
        if allocation is None:
            return  # nothing of it is saved
        ledger.version[allocation] += 1
        self.saved.written(tensor.untyped_storage(), allocation)
        if resizes:
            ledger.resized(tensor, allocation)


def _alias(tensor: Tensor) -> Tensor:
    """What autograd saves without its graph; above autograd, the version counter is shared."""
    if tensor.is_inference():
        return tensor
    with torch._C._DisableTorchDispatch():
        return tensor.detach()
