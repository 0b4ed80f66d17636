"""Memory of tensors that cannot be let go.

Responsible for telling whose memory is not torch's own: of a mapped file, an array, a parkable
model, or shared between processes. Not responsible for what is done about it.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.barrier import without_barrier


def is_fixed(tensor: Tensor) -> bool:
    """Whether the memory of a tensor cannot be let go and had again.

    Args:
        tensor: A strided tensor. One without memory, or behind a barrier, is fine.

    Returns:
        Whether its storage cannot be resized, or other processes have it too. Of a GPU's memory
        torch says that it is always shared (``Tensor.is_shared``), which tells nothing; what came
        from another process cannot be resized there (``THPStorage_newSharedCuda``).
    """
    if isinstance(tensor, FakeTensor):
        return False
    with without_barrier():
        if tensor.is_meta:
            return False
        storage = tensor.untyped_storage()
        if not storage.resizable():
            return True
        # Of memory that is let go now there is no address, and to ask for it would end the process.
        is_here = storage.nbytes() > 0
        return is_here and storage.device.type == "cpu" and bool(storage.is_shared())
