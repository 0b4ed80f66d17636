"""Fake copies of a model, a batch and an optimizer: shapes without memory.

Responsible for making the copies and for the settings that make libraries treat fakes as ordinary
tensors. Not responsible for running the step. The user's model, its gradients and the random state
stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map_only

from memfit.capture.probe.any_scalar import AnyScalar
from memfit.capture.record.recorder import RealStepNeeded
from memfit.capture.stage.cuda import choose_foreach, move_batch, move_model
from memfit.capture.stage.stage import (
    Stage,
    batch_entries,
    build_optimizer,
    device_of,
    empty_gradient,
    resize_batch,
)
from memfit.capture.stage.stand_in import measured_updates
from memfit.errors import MemfitError, WorkloadError
from memfit.tensors.narrow_parameters import is_narrow, own_type
from memfit.tensors.storage import graph_of, is_wrapper
from memfit.weights.in_eight_bits import own_weights
from memfit.weights.one_device import refuse_several
from memfit.weights.slots import slots_of
from memfit.weights.weightless import fake_mode_of
from memfit.workload import Workload, batch_size


def fake_stage(workload: Workload, device: str | None = None) -> Stage:
    """Copy a workload onto fakes.

    Args:
        workload: The workload; nothing of it changes.
        device: ``cpu`` or ``cuda``; ``None`` for where the model is.

    Returns:
        A stage; :func:`initialise_optimizer` gives its optimizer state.

    Raises:
        RealStepNeeded: The model cannot be copied.
        SeveralDevicesError: The model lies on several GPUs.
        WorkloadError: The optimizer cannot be built.
    """
    refuse_several(workload.model)
    mode = fake_mode_of(workload.model) or FakeTensorMode()
    try:
        with FakeCopyMode(mode):
            model = copy.deepcopy(workload.model)
    except Exception as error:
        message = f"the model cannot be copied onto fake tensors ({type(error).__name__}: {error})"
        raise RealStepNeeded(message) from error
    for parameter in model.parameters():
        parameter.grad = None
    _without_a_plan(model, workload.model, mode)
    if any(tensor.layout is not torch.strided for _, tensor in batch_entries(workload.batch)):
        raise RealStepNeeded("the batch holds a sparse tensor")
    kind = device or device_of(workload.model)
    with mode:
        if kind == "cuda":
            move_model(model)
        try:
            optimizer = build_optimizer(workload, model, mode.from_tensor)
        except MemfitError:
            raise
        except Exception as error:  # noqa: BLE001 - it is the user's, and another way is tried
            message = f"the optimizer could not be built on tensors without values: {_told(error)}"
            failure = WorkloadError(message, phase="build")
            failure.__cause__ = error
            optimizer = _measured(workload, list(model.parameters()), None, kind, failure)
    if kind == "cuda":
        choose_foreach(optimizer)
    buffers = dict(workload.model.named_buffers())
    stage = Stage(workload, model, None, optimizer, mode, None, buffers, kind)
    set_batch(stage, batch_size(workload.batch, workload.batch_dim))
    return stage


def _without_a_plan(model: nn.Module, original: nn.Module, mode: FakeTensorMode) -> None:
    """Have what a plan holds in fewer bits as the user had it: the step is planned anew."""
    narrow = {name: p for name, p in original.named_parameters() if is_narrow(p)}
    for name, parameter in model.named_parameters():
        if name in narrow:
            with mode:
                parameter.data = parameter.data.to(own_type(narrow[name]))
    quantized = own_weights(original)
    for slot in slots_of(model) if quantized else ():
        own = quantized.get(slot.names[0])
        if own is not None:
            with mode:
                wide = torch.empty(own.shape, dtype=own.dtype, device=slot.tensor.device)
            slot.put(nn.Parameter(wide, own.requires_grad))


def set_batch(stage: Stage, size: int) -> None:
    """Give a fake stage a batch of ``size`` examples, made from the workload's.

    Args:
        stage: The stage to change.
        size: Number of examples; ignored when the batch has no batch dimension.
    """
    workload = stage.workload
    assert stage.fake_mode is not None
    given = batch_size(workload.batch, workload.batch_dim)
    stage.real_batch = resize_batch(workload.batch, given, size, workload.batch_dim)
    # A fake of a graph's result cannot be differentiated, and the graph before is not of the step.
    leaves: dict[int, Tensor] = {}
    convert = stage.fake_mode.from_tensor

    def converted(tensor: Tensor) -> Tensor:
        if graph_of(tensor) is not None:
            tensor = leaves.setdefault(id(tensor), tensor.detach().requires_grad_())
        return convert(tensor)

    stage.batch = tree_map_only(Tensor, converted, stage.real_batch)
    if stage.device == "cuda":
        with stage.fake_mode:
            stage.batch = move_batch(stage.batch)


def initialise_optimizer(stage: Stage) -> None:
    """Make the optimizer allocate its lazy state, as its first step would.

    Args:
        stage: The stage; its gradients are absent before and after.

    Raises:
        WorkloadError: The optimizer's step failed.
    """
    optimizer = stage.optimizer
    if optimizer is None or optimizer.state:
        return
    stage.state_is_lazy = True
    for parameter in stage.trainable():
        parameter.grad = empty_gradient(optimizer, parameter)
    failure = _first_step(optimizer, stage.device)
    if failure is not None:
        stage.optimizer = _measured(
            stage.workload, stage.trainable(), optimizer, stage.device, failure
        )
        stage.optimizer.step()
    for parameter in stage.trainable():
        parameter.grad = None


def _first_step(optimizer: torch.optim.Optimizer, device: str) -> WorkloadError | None:
    """Take a first step on fakes; why that does not tell what a step takes, ``None`` if it does."""
    name = f"`{type(optimizer).__name__}.step()`"
    try:
        with AnyScalar() as asked:
            optimizer.step()
    except Exception as error:  # noqa: BLE001 - as above
        message = f"{name} failed on tensors without values: {_told(error)}"
        failure = WorkloadError(message, phase="optimizer")
        failure.__cause__ = error
        return failure
    if not asked.others or device != "cpu":
        return None
    ops = ", ".join(f"`{op}`" for op in asked.others)
    return WorkloadError(f"{name} runs {ops}, which may take anything", phase="optimizer")


def _measured(
    workload: Workload,
    parameters: list[nn.Parameter],
    built: torch.optim.Optimizer | None,
    device: str,
    failure: WorkloadError,
) -> torch.optim.Optimizer:
    """What stands for an optimizer that cannot be followed on fakes, by small real steps of it.

    Raises:
        WorkloadError: It fails on real tensors too; ``failure`` itself where these cannot tell,
            as on a CPU of what a GPU does.
    """
    if device != "cpu" or any(is_wrapper(type(p)) for p in parameters):
        raise failure
    try:
        return measured_updates(workload, parameters, built)
    except Exception as error:
        message = (
            f"{failure}; on small real ones it fails too: {_told(error)}\n"
            "hint: give an `optimizer` that runs on a CPU, such as `torch.optim.AdamW`"
        )
        raise WorkloadError(message, phase=failure.phase) from error


def _told(error: Exception) -> str:
    """What an error says first."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make libraries that look for fakes take the path they take with real tensors.

    transformers treats a fake tensor as a sign of tracing and builds masks that the real step does
    not build. It is patched only where it is imported already. A failing op is reported by memfit,
    so torch's own log of it is switched off meanwhile, and its warning of recurrent networks, which
    ask where their weights lie.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    patched = module is not None and original is not None
    if patched:
        module.is_fake_tensor = _never  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.setLevel(level)
        if patched:
            module.is_fake_tensor = original  # type: ignore[union-attr]


def _never(_tensor: Any) -> bool:
    return False


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put the random states of torch, of GPUs in use, Python and numpy back on leaving."""
    state = torch.get_rng_state()
    # A real step draws on the GPU. What is pretended draws nowhere, and asking would start CUDA.
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
