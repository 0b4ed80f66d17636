"""Building a model without its weights.

Responsible for making the parameters of a model, while it is being built, fakes: shapes without
memory, whatever its constructor does with them afterwards. What is built like this can be captured,
predicted and planned, not run. Module buffers and the batch stay real, since a step may look at
their values. Not responsible for copying a model that exists (:mod:`memfit.capture.stage.fake`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.errors import CaptureError
from memfit.workload import Workload


class WeightsNeededError(CaptureError):
    """A step without weights turned out to need their values."""


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Build models inside this without taking memory for their parameters.

    ``with memfit.weightless(): workload = build()`` lets a model be predicted and planned that does
    not fit into the memory of this machine. Each parameter becomes a fake when it is registered; a
    constructor that fills its tensors before that has one of them at a time. A constructor that
    reads values of its parameters fails with torch's own error.

    Parameters are all that is weightless: random numbers drawn for them are not drawn, so a model
    built inside is not the one built outside from the same seed.
    """
    mode = FakeTensorMode()
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            parameter = _fake_parameter(parameter, mode)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        with warnings.catch_warnings():
            # Constructors copy layers (`nn.TransformerEncoder`), and copying asks for an address.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    """A fake of the same shape, type, device and attributes."""
    fake = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(fake, name, value)
    return fake


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
        raise WeightsNeededError(message)
