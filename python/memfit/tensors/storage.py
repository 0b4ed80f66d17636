"""Memory of tensors that cannot be let go.

Responsible for telling whose memory is not torch's own: of a mapped file, an array, a parkable
model, or shared between processes; and which parameters somebody keeps a view of. Not responsible
for what is done about it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.tensors.barrier import without_barrier


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


def viewed(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those parameters of a model whose memory others see too.

    Args:
        parameters: All parameters of the model, behind no barrier.

    Returns:
        Those with a view that somebody keeps: ``parameter.data``, or a parameter of another model.
        Parameters of the same model that share their memory do not count as others.
    """
    sharing: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.layout is torch.strided:
            sharing.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    found = []
    for tensors in sharing.values():
        storage = tensors[0].untyped_storage()
        # torch/csrc/Module.cpp: owners of the memory, this object of Python's among them.
        owners = torch._C._storage_Use_Count(storage._cdata) - 1
        if owners > len(tensors):
            found += tensors
    return found
