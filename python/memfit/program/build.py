"""A target's workload, as light as it can be built, also for a GPU that is not there.

Responsible for trying without weights and without a GPU. Not responsible for finding the target
(:mod:`memfit.program.target`) nor for what fakes and a missing GPU need
(:mod:`memfit.weights`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfit._native import bytes_text
from memfit.capture.probe.workspace import available_bytes
from memfit.errors import CaptureError, UsageError, WorkloadError, first_line
from memfit.program.target import Settings, workload_factory
from memfit.weights.absent_gpu import AbsentGpu, is_pretended, pretended_gpu
from memfit.weights.one_device import SeveralDevicesError
from memfit.weights.weightless import Registered, weightless
from memfit.workload import Workload

_FLAG = "--real-weights"
"""What builds weights that memory is said to be too small for."""

_OF_NO_GPU = ("cuda", "nvidia")
"""What errors of torch speak of where code asks for a GPU and there is none."""

_NO_GPU = (
    "there is no GPU here: let it be built as on the CPU, without `device_map`, streams, "
    "events and generators, and give `--device cuda`, which predicts it for one"
)


@dataclass(frozen=True, slots=True)
class Built:
    """A target's workload.

    Attributes:
        workload: The workload.
        device: Kind of device to capture it for; ``None`` for its own.
        notes: What its user should know of how it was built.
    """

    workload: Workload
    device: str | None
    notes: tuple[str, ...] = ()


def lightest(target: str, settings: Settings, device: str | None) -> Built:
    """Build a target, without weights where its constructor allows that.

    Args:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        settings: Arguments of the function.
        device: Kind of device the step is captured for; ``None`` for the workload's own.

    Returns:
        The workload, for ``cuda`` also where the target itself asks for a GPU that is not there.

    Raises:
        UsageError: The target cannot be found, or the settings do not match its parameters; or it
            has to be built with its weights, which this machine has no memory for.
        WorkloadError: It fails by itself.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        return _without_gpu(target, settings, device)
    registered = Registered()
    try:
        with weightless(registered):
            return Built(workload_factory(target, settings)(), device)
    except SeveralDevicesError:
        raise
    except Exception as error:  # noqa: BLE001 - the build below says it better
        wants_gpu = not has_gpu and _speaks_of_gpu(error)
        why = _failed(error)
    if wants_gpu:
        return _without_gpu(target, settings, device or "cuda")
    _require_room(registered.bytes, why, "at least ")
    return _for_real(target, settings, device, why)


def for_real(target: str, settings: Settings, device: str | None) -> Built:
    """Build a target with its weights, however much memory there is.

    Args:
        target: As for :func:`lightest`.
        settings: As for :func:`lightest`.
        device: As for :func:`lightest`.

    Raises:
        UsageError: The target cannot be found, or the settings do not match its parameters.
        WorkloadError: It fails by itself.
    """
    return _for_real(target, settings, device, f"`{_FLAG}` asks for them")


def _for_real(target: str, settings: Settings, device: str | None, why: str) -> Built:
    """Build a target with its weights; where it asks for a GPU that is not there, without that."""
    has_gpu = torch.cuda.is_available()
    if device != "cuda" or has_gpu:
        try:
            workload = workload_factory(target, settings)()
            return Built(workload, device, _notes(workload, why))
        except WorkloadError as error:
            if has_gpu or not _speaks_of_gpu(error):
                raise
    return _for_real_without_gpu(target, settings, device or "cuda", why)


def _for_real_without_gpu(target: str, settings: Settings, device: str, why: str) -> Built:
    with pretended_gpu(), AbsentGpu(), no_gpu_explained():
        workload = workload_factory(target, settings)()
    return Built(workload, device, _notes(workload, why))


def with_weights(target: str, settings: Settings, built: Built, why: str) -> Built:
    """Build a target again, with its weights.

    Args:
        target: As for :func:`lightest`.
        settings: As for :func:`lightest`.
        built: What :func:`lightest` returned.
        why: Why that will not do, as a clause.

    Raises:
        UsageError: As for :func:`lightest`.
        WorkloadError: As for :func:`lightest`.
    """
    _require_room(_weights(built.workload), why, "")
    if torch.cuda.is_available() or built.device != "cuda":
        workload = workload_factory(target, settings)()
    else:
        with pretended_gpu(), AbsentGpu():
            workload = workload_factory(target, settings)()
    return Built(workload, built.device, _notes(workload, why))


def _without_gpu(target: str, settings: Settings, device: str) -> Built:
    """Build a target as on a machine with a GPU, its tensors on the CPU."""
    registered = Registered()
    try:
        with pretended_gpu(), weightless(registered), AbsentGpu():
            return Built(workload_factory(target, settings)(), device)
    except SeveralDevicesError:
        raise
    except Exception as error:  # noqa: BLE001 - the build below says it better
        why = _failed(error)
    _require_room(registered.bytes, why, "at least ")
    return _for_real_without_gpu(target, settings, device, why)


@contextlib.contextmanager
def no_gpu_explained() -> Iterator[None]:
    """Say what to do to errors that come of a GPU that is not there."""
    try:
        yield
    except (WorkloadError, CaptureError) as error:
        is_explained = bool(getattr(error, "__notes__", ()))
        if is_pretended() and not is_explained and _speaks_of_gpu(error):
            error.add_note(_NO_GPU)
        raise


def _failed(error: Exception) -> str:
    """Why the weights are built after all."""
    cause = error.__cause__ or error
    return f"building without them failed ({type(cause).__name__}: {first_line(cause)})"


def _weights(workload: Workload) -> int:
    return sum(parameter.nbytes for parameter in workload.model.parameters())


def _require_room(weights_bytes: int, why: str, about: str) -> None:
    """Refuse weights that there is no memory for: taking them would end the process.

    Raises:
        UsageError: There is not.
    """
    free_bytes = available_bytes()
    if weights_bytes > free_bytes:
        message = (
            f"the weights would have to be built, because {why}; they take {about}"
            f"{bytes_text(weights_bytes)}, and {bytes_text(free_bytes)} are free\n"
            f"hint: `{_FLAG}` builds them all the same; `--set` may build a smaller one, and what "
            "reads weights may move out of the function"
        )
        raise UsageError(message)


def _notes(workload: Workload, why: str) -> tuple[str, ...]:
    return (f"the weights were built, {bytes_text(_weights(workload))} of them: {why}",)


def _speaks_of_gpu(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is about a GPU."""
    while error is not None:
        if any(word in str(error).lower() for word in _OF_NO_GPU):
            return True
        error = error.__cause__
    return False
