"""A target's workload, as light as it can be built, also for a GPU that is not there.

Responsible for trying without weights and without a GPU. Not responsible for finding the target
(:mod:`memfit.program.target`) nor for what fakes and a missing GPU need
(:mod:`memfit.weights`).
"""

from __future__ import annotations

import contextlib

import torch

from memfit.program.target import Settings, workload_factory
from memfit.weights.absent_gpu import AbsentGpu, pretended_gpu
from memfit.weights.weightless import weightless
from memfit.workload import Workload

Built = tuple[Workload, str | None]
"""A workload, and the kind of device to capture it for; ``None`` for its own."""

_OF_NO_GPU = ("cuda", "nvidia")
"""What errors of torch speak of where code asks for a GPU and there is none."""


def lightest(target: str, settings: Settings, device: str | None) -> Built:
    """Build a target, without weights where its constructor allows that.

    Args:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        settings: Arguments of the function.
        device: Kind of device the step is captured for; ``None`` for the workload's own.

    Returns:
        The workload and the kind of device: ``cuda`` also where the target itself asks for a GPU
        that is not there.

    Raises:
        UsageError: The target cannot be found, or the settings do not match its parameters.
        WorkloadError: It fails by itself.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        return _without_gpu(target, settings), device
    try:
        with weightless():
            return workload_factory(target, settings)(), device
    except Exception as error:  # noqa: BLE001 - the build below says it better
        wants_gpu = not has_gpu and _speaks_of_gpu(error)
    if wants_gpu:
        return _without_gpu(target, settings), device or "cuda"
    return workload_factory(target, settings)(), device


def with_weights(target: str, settings: Settings, device: str | None) -> Workload:
    """Build a target with its weights.

    Args:
        target: As for :func:`lightest`.
        settings: As for :func:`lightest`.
        device: As :func:`lightest` returned it.

    Raises:
        UsageError: As for :func:`lightest`.
        WorkloadError: As for :func:`lightest`.
    """
    if torch.cuda.is_available() or device != "cuda":
        return workload_factory(target, settings)()
    with pretended_gpu(), AbsentGpu():
        return workload_factory(target, settings)()


def _without_gpu(target: str, settings: Settings) -> Workload:
    """Build a target as on a machine with a GPU, its tensors on the CPU."""
    with pretended_gpu(), contextlib.suppress(Exception), weightless(), AbsentGpu():
        return workload_factory(target, settings)()
    return with_weights(target, settings, "cuda")


def _speaks_of_gpu(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is about a GPU."""
    while error is not None:
        if any(word in str(error).lower() for word in _OF_NO_GPU):
            return True
        error = error.__cause__
    return False
