"""The one real step, for models that cannot be followed on fakes.

Responsible for copying a workload for real at a small batch, and for refusing where that would not
fit. Not responsible for running or recording. The user's model is never run: a copy is, so its
parameters, buffers and gradients stay as they are bit for bit.
"""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import nn

from memfit.capture.probe.workspace import available_bytes
from memfit.capture.stage.stage import (
    Stage,
    batch_entries,
    build_optimizer,
    device_of,
    empty_gradient,
    resize_batch,
)
from memfit.errors import CaptureError, MemfitError, WorkloadError
from memfit.tensors.storage import plain_tensors
from memfit.workload import Workload, batch_size

_COPIES_OF_PARAMETERS = 5
"""What a training step of a copy takes besides activations: copy, gradient, optimizer state twice,
and one of slack."""


def real_stage(workload: Workload, size: int, reason: str) -> Stage:
    """Copy a workload for one real step.

    Args:
        workload: The workload; nothing of it changes.
        size: Number of examples; ignored when the batch has no batch dimension.
        reason: Why the step cannot be followed on fakes, for the refusal.

    Returns:
        A stage whose optimizer has its state.

    Raises:
        CaptureError: The copy would not fit, or cannot be made.
        WorkloadError: The optimizer failed.
    """
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    parts = chain.from_iterable(map(plain_tensors, tensors))
    needed = _COPIES_OF_PARAMETERS * sum(t.numel() * t.itemsize for t in parts)
    device = device_of(workload.model)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if needed > free:
        message = (
            f"{reason}, and one real step would need at least {needed} bytes for parameters, "
            f"gradients and optimizer state; {free} bytes are free"
        )
        raise CaptureError(message)
    try:
        model = copy.deepcopy(workload.model)
    except Exception as error:
        message = f"{reason}, and the model cannot be copied: {type(error).__name__}: {error}"
        raise CaptureError(message) from error
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a copy's weights lie apart, which cuDNN copies every time
    for parameter in model.parameters():
        parameter.grad = None
    try:
        optimizer = build_optimizer(workload, model)
        stage = Stage(workload, model, None, optimizer, None, None, {}, device)
        _initialise_optimizer(stage)
    except MemfitError:
        raise
    except Exception as error:
        message = f"the optimizer failed: {type(error).__name__}: {error}"
        raise WorkloadError(message, phase="optimizer") from error
    given = batch_size(workload.batch, workload.batch_dim)
    # A copy even where the size stays: the step may write to its batch.
    resized = resize_batch(workload.batch, given, size, workload.batch_dim)
    compressed = (t for _, t in batch_entries(resized) if t.layout is not torch.strided)
    stage.batch = copy.deepcopy(resized, {id(t): t.clone() for t in compressed})  # torch cannot
    stage.real_batch = stage.batch
    return stage


def _initialise_optimizer(stage: Stage) -> None:
    """Make the optimizer allocate its lazy state; the copy's parameters may move by it."""
    if stage.optimizer is None:
        return
    stage.state_is_lazy = not stage.optimizer.state
    for parameter in stage.trainable():
        parameter.grad = empty_gradient(stage.optimizer, parameter)
    stage.optimizer.step()
    _drop_gradients(stage.model)


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
