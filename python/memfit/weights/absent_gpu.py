"""Building for a GPU that is not there.

Responsible for code that asks for CUDA on a machine without: its tensors are made on the CPU, and
``torch.cuda`` answers as with one GPU. What is built like this can be captured for CUDA, predicted
and planned, not run. Not responsible for the fake GPU of a capture
(:mod:`memfit.capture.stage.cuda`).
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memfit.weights.one_device import AskedGpus

_CUDA = re.compile(r"cuda(:\d+)?")
_DEVICE = torch.device("cuda", 0)

_ANSWERS: dict[Any, dict[str, Any]] = {
    torch.cuda: {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "get_device_capability": (8, 0),
        "get_device_name": "a GPU that is not there",
    },
    torch.accelerator: {
        "is_available": True,
        "device_count": 1,
        "current_accelerator": _DEVICE,
        "synchronize": None,
    },
    # It looks for a driver; libraries ask it while they are imported.
    torch.utils._triton: {"has_triton": False},
}
"""What functions of torch say while a GPU is pretended, by their module and name."""


_ask_torch = torch.cuda.is_available


def is_pretended() -> bool:
    """Whether a GPU that ``torch.cuda`` tells of, if it does, is none."""
    return not _ask_torch()


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Have ``torch.cuda`` answer as with one GPU, where there is none."""
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for module, answers in _ANSWERS.items():
            for name, answer in answers.items():
                original = getattr(module, name)
                stack.callback(setattr, module, name, original)
                setattr(module, name, lambda *_, _answer=answer, **__: _answer)
        fakes = sys.modules.get("torch._subclasses.fake_tensor")  # importing it takes a second
        if fakes is not None:  # they compute constants on a GPU that they are told of
            mode, name = fakes.FakeTensorMode, "avoid_device_init"
            stack.callback(setattr, mode, name, getattr(mode, name))
            setattr(mode, name, property(lambda _: True))
        yield


class AbsentGpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA, while it is entered; a second GPU is refused."""

    def __init__(self) -> None:
        """Begin with no GPU asked for."""
        super().__init__()
        self._asked = AskedGpus("the target")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function with the CPU in place of CUDA."""
        kwargs = dict(kwargs or {})
        if func is torch.device:  # a name, which the step may use on the fake GPU
            return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            place = kwargs.get("device", args[1] if len(args) > 1 else None)
            self._here(place, may_be_index=True)
            return args[0]
        args = tuple(self._here(value, may_be_index=func is Tensor.to) for value in args)
        if "device" in kwargs:
            kwargs["device"] = self._here(kwargs["device"], may_be_index=True)
        return func(*args, **kwargs)

    def _here(self, value: Any, *, may_be_index: bool) -> Any:
        """The CPU in place of a device that is CUDA; other values as they are."""
        asked = _gpu(value, may_be_index=may_be_index)
        if asked is None:
            return value
        self._asked.ask(asked)
        return torch.device("cpu")


def _gpu(value: Any, *, may_be_index: bool) -> torch.device | None:
    """The GPU that a value names; ``None`` where it names none."""
    if isinstance(value, torch.device):
        return value if value.type == "cuda" else None
    if isinstance(value, str):
        named = _CUDA.fullmatch(value)
        return torch.device("cuda", int((named[1] or ":0")[1:])) if named else None
    if may_be_index and isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    return None
