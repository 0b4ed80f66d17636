"""What a checkpoint of the script recomputes in a recorded step, elsewhere until backward reads it.

Responsible for what autograd holds instead of tensors that the body of a checkpoint saves when it
runs again. Not responsible for meeting checkpoints (:mod:`memfit.capture.record.checkpoints`) nor
for where contents are kept (:mod:`memfit.run.script.spill`).

A recorded step keeps nothing in memory that autograd saves, and what a checkpoint recomputes would
be most of what it takes. The trace says that these tensors are in memory all the same: a planned
step leaves such a checkpoint as it is, and there they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.apply.remat.records import require_unchanged
from memfit.capture.record.ledger import Ledger
from memfit.capture.record.saves import Contents
from memfit.tensors.versions import version_of


class Recomputed:
    """Stands for a tensor that was recomputed, until nothing holds this any more.

    Torch's checkpoint holds it in the tensor's place and looks at what these attributes say.

    Attributes:
        shape: The tensor's.
        dtype: The tensor's.
        device: The tensor's.
        requires_grad: Never: it has no graph.
    """

    requires_grad = False

    def __init__(self, tensor: Tensor, ledger: Ledger, allocation: int, contents: Contents) -> None:
        """Stand for a tensor.

        Args:
            tensor: The tensor.
            ledger: Knows its allocation, which counts as in memory from here on.
            allocation: Its allocation.
            contents: Its storage's bytes.
        """
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._version = version_of(tensor)
        with torch._C._DisableTorchDispatch():
            self._alias = tensor.detach()
            # Shares the version counter still, and no longer the memory.
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._contents = contents
        self._ledger, self._allocation = ledger, allocation
        ledger.lend(allocation)

    def __del__(self) -> None:
        """The allocation need not be in memory for this any more."""
        if "_allocation" in vars(self):
            self._ledger.give_back(self._allocation)

    def tensor(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: It was written to since, as autograd itself would say.
            OSError: Its bytes cannot be read.
        """
        require_unchanged(self._alias, self._version, list(self.shape))
        with torch._C._DisableTorchDispatch():
            storage = self._contents.storage
            if not self._ledger.holds(storage):
                self._ledger.stand_in(storage, self._allocation)
            found = torch.empty(0, dtype=self.dtype, device=storage.device)
            found.set_(storage, *self._view)
            return found
