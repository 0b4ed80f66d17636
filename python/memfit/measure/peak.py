"""The measured peak of a call: what the allocator really handed out.

Responsible for the truth that predictions are held against. On the CPU it is the profiler's
allocator events, since torch keeps no memory statistics there: live bytes before the call plus the
largest prefix of what the call allocated and freed; where a plan keeps parameters elsewhere, it is
what is counted where torch allocates (:mod:`memfit.track.cpu`), since the profiler does not tell of
memory that goes in the call and came before it. On CUDA it is the caching allocator's own peak.
Resident set size is never used: the C library keeps freed pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.tensors.barrier import owner_of, without_barrier
from memfit.tensors.garbage import collected_before
from memfit.tensors.held import held_tensors
from memfit.tensors.optimizers import state_tensors
from memfit.tensors.profiled import profiled_bytes
from memfit.tensors.storage import plain_tensors
from memfit.track import cpu
from memfit.workload import Workload


@dataclass(slots=True, frozen=True)
class Measured:
    """The memory of one call.

    Attributes:
        peak_bytes: Most bytes allocated at once during the call, live bytes before it included.
        static_bytes: Bytes of the tensors that lived before it.
        left_bytes: Bytes the call allocated and did not free, or freed if negative.
    """

    peak_bytes: int
    static_bytes: int
    left_bytes: int


def static_tensors(workload: Workload, optimizer: Optimizer | None) -> list[Tensor]:
    """What lives before a step.

    Parameters, module buffers, gradients, optimizer state, the batch, and what the loss holds.
    """
    parameters = list(workload.model.parameters())
    tensors: list[Any] = [*parameters, *workload.model.buffers()]
    tensors += [p.grad for p in parameters if p.grad is not None]
    if optimizer is not None:
        tensors += chain.from_iterable(map(state_tensors, optimizer.state.values()))
        tensors += tree_leaves(
            [[v for k, v in group.items() if k != "params"] for group in optimizer.param_groups]
        )
    tensors += tree_leaves(workload.batch)
    tensors += held_tensors(workload).values()
    return [t for t in tensors if isinstance(t, Tensor)]


def storage_bytes(tensors: Iterable[Tensor], device: str = "cpu") -> int:
    """Bytes of the distinct storages behind tensors on one kind of device."""
    storages = {}
    with without_barrier():  # parameters that are elsewhere stay there, and take nothing
        for tensor in chain.from_iterable(map(plain_tensors, tensors)):
            if tensor.device.type == device and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def measure_peak(call: Callable[[], Any], static: Iterable[Tensor]) -> Measured:
    """Run ``call`` once and measure its peak.

    Run it once before: kernels, caches and optimizer state are set up on first use.

    Args:
        call: What to measure; its result is dropped.
        static: Tensors that live before it, such as :func:`static_tensors`.

    Returns:
        The measurement; on a machine with CUDA tensors among ``static``, that of CUDA.
    """
    static = list(static)
    cuda = next((t.device for t in static if t.device.type == "cuda"), None)
    with collected_before():
        if cuda is not None:
            return _cuda_peak(call, cuda)
        return _cpu_peak(call, static)


def _cuda_peak(call: Callable[[], Any], device: torch.device) -> Measured:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_allocated(device)
    return Measured(torch.cuda.max_memory_allocated(device), before, after - before)


def _cpu_peak(call: Callable[[], Any], static: list[Tensor]) -> Measured:
    if any(owner_of(tensor) is not None for tensor in static) and cpu.start() is None:
        return _counted_peak(call, static)
    static_bytes = storage_bytes(static)
    highest, left = profiled_bytes(call)
    return Measured(static_bytes + highest, static_bytes, left)


def _counted_peak(call: Callable[[], Any], static: list[Tensor]) -> Measured:
    """The peak where parameters go and come: the profiler sees no block go that it saw not come."""
    static_bytes = storage_bytes(static)
    window = cpu.Window()
    before = window.read()
    call()
    seen = window.close()
    assert before is not None  # a window that nobody has closed can be read
    assert seen is not None
    highest = seen.peak_bytes - before.current_bytes
    return Measured(static_bytes + highest, static_bytes, seen.current_bytes - before.current_bytes)
