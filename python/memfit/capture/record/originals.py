"""The tensors of the user's own workload, which a recorded step must not use.

Responsible for telling them, by their memory, and for the error that names one: a step is recorded
on copies of the model and the batch, so one that uses the originals would be counted with both and
would write to them. Not responsible for what else comes from outside, such as a table that a loss
closes over: that is part of the step.
"""

from __future__ import annotations

from torch import Tensor

from memfit.capture.stage.stage import batch_entries
from memfit.errors import UsageError
from memfit.tensors.barrier import without_barrier
from memfit.tensors.storage import plain_tensors
from memfit.workload import Workload


class Originals:
    """Parameters, module buffers and batch of a workload, by their storages."""

    def __init__(self, workload: Workload) -> None:
        """Know those of a workload, which keeps them alive."""
        self._storages: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._buffers: set[int] = set()
        with without_barrier():  # what a plan keeps elsewhere stays there
            for name, parameter in workload.model.named_parameters():
                self._add(parameter, f"the parameter `{name}` of the model")
            for name, buffer in workload.model.named_buffers():
                keys = {key for key in map(_key, plain_tensors(buffer)) if key is not None}
                self._buffers |= keys - self._storages.keys()
                self._add(buffer, f"the module buffer `{name}` of the model")
            for name, tensor in batch_entries(workload.batch):
                self._tensors.setdefault(id(tensor), f"`{name}` of the batch")
                # Of a batch that was cut from a data set, the rest may be used.
                if _fills_storage(tensor):
                    self._add(tensor, f"`{name}` of the batch")

    def may_have_a_twin(self, tensor: Tensor) -> bool:
        """Whether a tensor is a module buffer, whose fake may already stand for it."""
        return _key(tensor) in self._buffers

    def refuse(self, tensor: Tensor) -> None:
        """Refuse a tensor from outside the copies where it is one of the workload's.

        Raises:
            UsageError: It is.
        """
        name = self._tensors.get(id(tensor)) or self._storages.get(_key(tensor) or 0)
        if name is None:
            return
        message = (
            f"the step uses {name} itself instead of the copy it is given: `loss` and `forward` "
            "must use their arguments only, as in `lambda model, batch: ...`"
        )
        error = UsageError(message)
        error.add_note(
            "a function that a module keeps must not reach the module either, as a lambda over "
            "`self` does: make it a method"
        )
        raise error

    def _add(self, tensor: Tensor, name: str) -> None:
        for part in plain_tensors(tensor):
            key = _key(part)
            if key is not None:
                self._storages.setdefault(key, name)


def _key(tensor: Tensor) -> int | None:
    """What tells the memory of a tensor; ``None`` where it has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def _fills_storage(tensor: Tensor) -> bool:
    return _key(tensor) is not None and tensor.nbytes >= tensor.untyped_storage().nbytes()
