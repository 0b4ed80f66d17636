"""Building a model without its weights.

Responsible for making the parameters of a model, while it is being built, fakes: shapes without
memory, whatever its constructor does with them afterwards. What is built like this can be captured,
predicted and planned, not run. Module buffers and the batch stay real, since a step may look at
their values. Not responsible for copying a model that exists (:mod:`memfit.capture.stage.fake`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.errors import CaptureError
from memfit.workload import Workload


class WeightsNeededError(CaptureError):
    """A step without weights turned out to need their values.

    Attributes:
        reason: Why, as a clause.
    """

    def __init__(self, message: str, reason: str) -> None:
        """Say it.

        Args:
            message: For users.
            reason: Why, as a clause.
        """
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Registered:
    """What was built without weights.

    Attributes:
        bytes: What the parameters registered so far would take.
    """

    bytes: int = 0


@contextlib.contextmanager
def weightless(registered: Registered | None = None) -> Iterator[None]:
    """Build models inside this without taking memory for their parameters.

    ``with memfit.weightless(): workload = build()`` lets a model be predicted and planned that does
    not fit into the memory of this machine. Each parameter becomes a fake when it is registered; a
    constructor that fills its tensors before that has one of them at a time. A constructor that
    reads values of its parameters fails with torch's own error. Conversions of what was built
    (``.half()``, ``.to()``) work inside, too.

    Parameters are all that is weightless: random numbers drawn for them are not drawn, so a model
    built inside is not the one built outside from the same seed.

    Args:
        registered: Told of what was built.
    """
    mode = FakeTensorMode()
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            parameter = _fake_parameter(parameter, mode)
            if registered is not None:
                registered.bytes += parameter.nbytes
        original(module, name, parameter)

    unconverted = nn.Module._apply
    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    nn.Module._apply = _converting(unconverted)  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            # Constructors copy layers (`nn.TransformerEncoder`), and copying asks for an address.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        nn.Module._apply = unconverted  # type: ignore[method-assign]


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    """A fake of the same shape, type, device and attributes."""
    fake = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(fake, name, value)
    return fake


def _converting(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """What stands for ``nn.Module._apply``: ``.half()``, ``.to()`` and their kin also of fakes.

    Torch swaps such a parameter with its converted twin, which it refuses while anything refers to
    either weakly, as the mode of fakes does. So it gets the twin's data, as a real one does: it
    stays the parameter of all modules that share it, and of optimizers that know it.
    """

    def apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - torch's own signature
        own = module._parameters
        fakes: dict[str, Any] = {
            name: value for name, value in own.items() if isinstance(value, FakeTensor)
        }
        own.update(dict.fromkeys(fakes))
        try:
            converted = original(module, fn, recurse)
        finally:
            own.update(fakes)
        for parameter in fakes.values():
            with torch.no_grad():
                applied = fn(parameter)
            if applied is not parameter:
                parameter.data, parameter.fake_device = applied, applied.fake_device
        return converted

    return apply


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode that a weightless model's parameters belong to; ``None`` for a real model."""
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            mode: FakeTensorMode = parameter.fake_mode
            return mode
    return None


def require_weights(workload: Workload, reason: str) -> None:
    """Refuse what needs values of a model that has none.

    Args:
        workload: The workload that is about to be run.
        reason: Why it has to be run, as a clause.

    Raises:
        WeightsNeededError: The model was built by :func:`weightless`.
    """
    if fake_mode_of(workload.model) is not None:
        message = f"{reason}, but the model was built without weights: build it ordinarily"
        raise WeightsNeededError(message, reason)
