"""The state of the generator that a random op draws from, taken before it and put back for replay.

Responsible for finding the generator of a call and for saving and restoring its state. Every
backend's default generator and generators passed as an argument are covered.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.weights.absent_gpu import is_pretended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(slots=True, frozen=True)
class GeneratorState:
    """A generator at a moment.

    Attributes:
        generator: The generator of the call; ``None`` for the default one of ``device``.
        device: The device of the op.
        state: The state, as bytes: kept outside the tensor allocator.
    """

    generator: torch.Generator | None
    device: torch.device
    state: bytes

    @staticmethod
    def before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> GeneratorState:
        """The state that a call with these arguments is about to draw from."""
        generator = _generator_argument(args, kwargs)
        device = generator.device if generator is not None else _device(args, kwargs)
        return GeneratorState(generator, device, _read(generator, device))

    @staticmethod
    def of(device: torch.device) -> GeneratorState:
        """The state of a device's default generator."""
        return GeneratorState(None, device, _read(None, device))

    def put_back(self) -> None:
        """Set the generator to this state."""
        _write(self.generator, self.device, self.state)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run with the generator as it was, and put back afterwards what it is now."""
        current = _read(self.generator, self.device)
        _write(self.generator, self.device, self.state)
        try:
            yield
        finally:
            _write(self.generator, self.device, current)


def _generator_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    return None


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for value in args:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    return item.device
    return torch.device("cpu")


def _read(generator: torch.Generator | None, device: torch.device) -> bytes:
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.default_generator.get_state()
    elif _is_absent(device):
        return b""  # fakes draw from no generator
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return ctypes.string_at(state.data_ptr(), state.numel())


def _is_absent(device: torch.device) -> bool:
    """Whether a step is recorded for a GPU that is not there."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return device.type == "cuda" and not is_used and is_pretended()


def _write(generator: torch.Generator | None, device: torch.device, state: bytes) -> None:
    if not state:
        return
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if generator is not None:
        generator.set_state(tensor)
    elif device.type == "cpu":
        torch.default_generator.set_state(tensor)
    else:
        torch.get_device_module(device).set_rng_state(tensor, device)
