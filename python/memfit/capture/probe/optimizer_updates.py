"""What the optimizer does for one parameter at a time.

Responsible for probing, on fakes, the temporaries and the traffic of an update of one parameter,
and for saying why an optimizer cannot be run that way. Not responsible for running it inside
backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.probe.any_scalar import SCALAR, scalar_or_any
from memfit.capture.record.roles import Update
from memfit.capture.stage.stage import Stage
from memfit.tensors.operators import operator_of
from memfit.tensors.optimizers import (
    gradients_reduced_later,
    shared_state,
    step_of_others,
    unknown_optimizer,
)
from memfit.tensors.sliced_update import slices_of, update_in_slices
from memfit.tensors.storage import is_wrapper, plain_tensors


def fused_optimizer_refusal(stage: Stage) -> str | None:
    """Why the optimizer cannot run parameter by parameter inside backward.

    Args:
        stage: The stage after its optimizer was built.

    Returns:
        One clause, or ``None`` when it can.
    """
    optimizer = stage.optimizer
    if optimizer is None:
        return "the workload has no optimizer"
    unknown = unknown_optimizer(optimizer)
    if unknown is not None:
        return unknown
    if stage.workload.clip_grad_norm is not None:
        return "gradient clipping needs all gradients at once"
    reduced = gradients_reduced_later(stage.workload.model)
    if reduced is not None:
        return reduced
    return _hooked_or_shared(stage, optimizer)


def per_parameter_refusal(stage: Stage) -> str | None:
    """Why the optimizer cannot run parameter by parameter once all gradients are there.

    Args:
        stage: The stage after its optimizer was built.

    Returns:
        One clause, or ``None`` when it can.
    """
    optimizer = stage.optimizer
    if optimizer is None:
        return "the workload has no optimizer"
    return unknown_optimizer(optimizer) or _hooked_or_shared(stage, optimizer)


def _hooked_or_shared(stage: Stage, optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, SparseAdam):
        return "`SparseAdam` takes sparse gradients"
    given = stage.workload.optimizer
    hooked = given if isinstance(given, Optimizer) else optimizer
    return step_of_others(hooked) or shared_state(optimizer) or _wrapped(stage)


def _wrapped(stage: Stage) -> str | None:
    """Whether a parameter's bytes are those of several tensors, of which none is its own."""
    kinds = [type(p).__name__ for p in stage.trainable() if is_wrapper(type(p))]
    return f"a parameter is a `{kinds[0]}`, which wraps other tensors" if kinds else None


def probe_updates(stage: Stage, updates: list[tuple[nn.Parameter, Update]]) -> None:
    """Fill in the temporaries and the traffic of each parameter's own update.

    Args:
        stage: A fake stage whose optimizer has its state; unchanged but for the step counters.
        updates: Pairs of parameter and what is known about it.
    """
    optimizer = stage.optimizer
    if optimizer is None:
        return
    group_of = {id(p): index for index, g in enumerate(optimizer.param_groups) for p in g["params"]}
    measured: dict[tuple[Any, ...], tuple[int, int]] = {}
    for parameter, update in updates:
        group = group_of.get(id(parameter))
        if group is None:
            continue
        key = (tuple(parameter.shape), parameter.stride(), parameter.dtype, group)
        if key not in measured:
            measured[key] = _probe(optimizer, parameter, group)
        update.temporary_bytes, update.moved_bytes = measured[key]


SLICES_TOLD = 2
"""Slices that are run: the first, which is as large as any, and one beside what it left."""


def _probe(optimizer: Optimizer, parameter: nn.Parameter, group: int) -> tuple[int, int]:
    held = [g["params"] for g in optimizer.param_groups]
    parameter.grad = torch.empty_like(parameter)
    count = slices_of(optimizer, optimizer.param_groups[group], parameter)

    def step(updated: list[Tensor]) -> None:
        for index, candidate in enumerate(optimizer.param_groups):
            candidate["params"] = updated if index == group else []
        optimizer.step()

    share = 1.0
    try:
        with Temporaries() as temporaries:
            if count > 1:
                done = update_in_slices(optimizer, parameter, count, step, most=SLICES_TOLD)
                share = done / parameter.numel()
            else:
                step([parameter])
    finally:
        parameter.grad = None
        for candidate, parameters in zip(optimizer.param_groups, held, strict=True):
            candidate["params"] = parameters
    return temporaries.peak_bytes, round(temporaries.moved_bytes / share)


class Temporaries(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that ops make while it is entered, and the bytes they move.

    Attributes:
        peak_bytes: Most bytes of such storages at once.
        moved_bytes: Bytes that ops read and wrote.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.moved_bytes = 0
        self._alive_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented  # as in the recording
        if not operator_of(func).counted:
            return func(*args, **kwargs)
        inputs = _distinct([*args, *kwargs.values()])
        for tensor in inputs.values():
            self._see(tensor, fresh=False)
        out = scalar_or_any(args[0]) if func is SCALAR else func(*args, **kwargs)
        outputs = _distinct([out])
        for tensor in outputs.values():
            self._see(tensor, fresh=True)
        if not func.is_view:
            touched = {**inputs, **outputs}
            self.moved_bytes += sum(t.numel() * t.itemsize for t in touched.values())
        return out

    def _see(self, tensor: Tensor, *, fresh: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if fresh else 0

        def died(_ref: Any) -> None:
            del self._known[key]
            self._alive_bytes -= size

        self._known[key] = weakref.ref(storage, died)
        self._alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)


def _distinct(leaves: list[Any]) -> dict[int, Tensor]:
    """Tensors among nested arguments, each once; of sparse ones the parts."""
    found: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update((id(part), part) for part in plain_tensors(leaf))
        elif isinstance(leaf, (list, tuple)):
            found.update(_distinct(list(leaf)))
    return found
