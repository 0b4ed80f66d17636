"""What the update of a parameter by a sparse gradient takes, learnt on a few rows.

Responsible for running the optimizer's step on a small parameter of which each row has a gradient:
such an update touches the rows of its gradient alone, so what it takes grows with them. Fakes do
not tell, as they know no number of rows. Not responsible for other updates
(:mod:`memfit.run.script.update_needs`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from memfit import _native
from memfit.apply.optimizer_in_backward import plain_step
from memfit.capture.probe.optimizer_updates import Temporaries
from memfit.tensors.optimizers import with_room
from memfit.tensors.storage import gradient_of

_ROWS = 1024
"""Most rows that are run."""


@dataclass(frozen=True, slots=True)
class SparseUpdate:
    """What one takes.

    Attributes:
        temporary_bytes: Most bytes of temporaries.
        moved_bytes: Bytes read and written.
        state_bytes: Sizes of the tensors of its state.
    """

    temporary_bytes: int
    moved_bytes: int
    state_bytes: list[int]


def is_sparse(parameter: Tensor) -> bool:
    """Whether a parameter has a sparse gradient.

    Args:
        parameter: The parameter.
    """
    gradient = gradient_of(parameter)
    return gradient is not None and gradient.layout is not torch.strided


def sparse_refusal(optimizer: Optimizer) -> str | None:
    """Why parameters with sparse gradients cannot be updated each alone; ``None`` where they can.

    The momentum of SGD is sparse itself, and grows. Other optimizers refuse sparse gradients.

    Args:
        optimizer: The optimizer.
    """
    groups = optimizer.param_groups
    if not any(is_sparse(p) for group in groups for p in group["params"]):
        return None
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    is_known = type(optimizer) in (Adagrad, SparseAdam)
    is_plain = type(optimizer) is SGD and not any(group["momentum"] for group in groups)
    return None if on_cpu and (is_known or is_plain) else "a gradient is sparse"


def values_of(gradient: Tensor) -> Tensor:
    """The tensor of a gradient that has most of its bytes: its values, if it is sparse.

    Args:
        gradient: The gradient.
    """
    if gradient.layout is torch.strided:
        return gradient
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return gradient._values()


def sparse_update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> SparseUpdate:
    """What the update of a parameter takes by the sparse gradient that it has.

    Args:
        optimizer: Its optimizer; it stays as it is.
        group: The group that lists it.
        parameter: The parameter.

    Raises:
        NotImplementedError: Its gradient is sparse in another way than by rows.
    """
    gradient = gradient_of(parameter)
    assert gradient is not None, "it has a sparse one"
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise NotImplementedError("a gradient is sparse in another way than by rows")
    values = values_of(gradient)
    rows = min(len(values), _ROWS)
    small = _on_rows(optimizer, group, parameter, _like(gradient, rows))
    (twin,) = small.param_groups[0]["params"]
    step = plain_step(small)
    step(small)  # what makes the state
    window = _native.AllocationWindow()
    try:
        before = _native.counted_bytes()
        with Temporaries() as temporaries:
            step(small)
        peak, _ = window.peak()
    finally:
        window.close()
    scale = len(values) / max(rows, 1)
    of_rows = len(parameter) / max(len(twin), 1)
    state = [it for it in small.state[twin].values() if isinstance(it, Tensor)]
    return SparseUpdate(
        ceil(max(peak - before, temporaries.peak_bytes) * scale),
        ceil(temporaries.moved_bytes * scale),
        [ceil(it.nbytes * (of_rows if it.shape == twin.shape else 1)) for it in state],
    )


def _like(gradient: Tensor, rows: int) -> Tensor:
    """A gradient of fewer rows, of which as large a part are of the same row of the parameter."""
    values = values_of(gradient)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        distinct = len(torch.unique(gradient._indices()))
    different = max(ceil(distinct * rows / max(len(values), 1)), 1)
    return torch.sparse_coo_tensor(
        (torch.arange(rows) % different)[None],
        torch.ones((rows, *values.shape[1:]), dtype=values.dtype),
        (different, *values.shape[1:]),
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
    )


def _on_rows(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, gradient: Tensor
) -> Optimizer:
    """The optimizer over a parameter of a few rows."""
    sizes = gradient.shape
    twin = nn.Parameter(torch.zeros(sizes, dtype=parameter.dtype))
    twin.grad = gradient
    small = copy.copy(optimizer)
    small.param_groups = [{**group, "params": [twin]}]
    small.state = defaultdict(dict)
    if parameter in optimizer.state:
        with FakeTensorMode():
            held = dict(with_room(optimizer.state[parameter]))
        for key, value in held.items():
            is_whole = isinstance(value, Tensor) and value.shape == parameter.shape
            own = value.clone() if type(value) is Tensor and not is_whole else value
            small.state[twin][key] = torch.zeros(sizes, dtype=value.dtype) if is_whole else own
    small._optimizer_step_pre_hooks = OrderedDict()
    small._optimizer_step_post_hooks = OrderedDict()
    return small
