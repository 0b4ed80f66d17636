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
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._device
import torch.utils._triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from memfit.tensors.storage import plain_tensors
from memfit.weights.one_device import AskedGpus

_CUDA = re.compile(r"cuda(:\d+)?")
_DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")

_NAME = "a GPU that is not there"
_CAPABILITY = (8, 0)
_MEMORY_BYTES = 80 << 30
"""Those of an A100 with 80 GB, whose speed plans take where no GPU is."""

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
        "get_device_capability": _CAPABILITY,
        "get_device_name": _NAME,
        "get_device_properties": SimpleNamespace(
            name=_NAME,
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=_MEMORY_BYTES,
            multi_processor_count=108,
            warp_size=32,
            is_integrated=False,
            is_multi_gpu_board=False,
        ),
        "mem_get_info": (_MEMORY_BYTES, _MEMORY_BYTES),
        "memory_stats": {},
        "memory_summary": "",
        "set_per_process_memory_fraction": None,
        "ipc_collect": None,
        "_exchange_device": 0,  # what entering and leaving `torch.cuda.device(0)` asks
        "_maybe_exchange_device": 0,
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
        stack.callback(setattr, torch, "load", torch.load)
        torch.load = partial(_load, torch.load)
        fakes = sys.modules.get("torch._subclasses.fake_tensor")  # importing it takes a second
        if fakes is not None:  # they compute constants on a GPU that they are told of
            mode, name = fakes.FakeTensorMode, "avoid_device_init"
            stack.callback(setattr, mode, name, getattr(mode, name))
            setattr(mode, name, property(lambda _: True))
        yield


def _load(load: Any, file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
    """What ``torch.load`` reads, on the CPU where a GPU is asked for or was when it was written."""
    is_told = map_location is not None and _gpu(map_location) is None
    return load(file, map_location if is_told else _CPU, *args, **options)


_on_gpu = WeakIdKeyDictionary()
"""Memory on the CPU that was asked for on a GPU; what is let go is forgotten."""

_READ: dict[Any, Any] = {
    Tensor.device.__get__: _DEVICE,
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    Tensor.get_device: 0,
}
"""What such memory says of itself."""


def is_on_absent_gpu(tensor: Tensor) -> bool:
    """Whether a tensor, or what it shows a part of, was asked for on a GPU that is not there.

    Args:
        tensor: Any tensor.
    """
    return any(storage in _on_gpu for storage in _storages((tensor,)))


class AbsentGpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA, while it is entered; a second GPU is refused.

    What was asked for on CUDA, and what is computed from that, says that it is there.
    """

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
        given = list(_storages((args, kwargs)))
        was_there = any(storage in _on_gpu for storage in given)
        if was_there and func in _READ:
            return _READ[func]
        place = _place(func, args, kwargs)
        gpu = _gpu(place)
        if gpu is not None:
            self._asked.ask(gpu)
            if not any(value is place for value in args):
                kwargs["device"] = _CPU
            args = tuple(_CPU if value is place else value for value in args)
        result = args[0] if func is Tensor.cuda else func(*args, **kwargs)
        if was_there and (func is Tensor.cpu or (place is not None and gpu is None)):
            return result.clone()  # on a GPU it would be a copy
        if gpu is not None or was_there:
            for storage in _storages(result):
                if gpu is not None or not any(storage is other for other in given):
                    _on_gpu[storage] = True
        return result


def _storages(values: Any) -> Iterator[Any]:
    """The memory of what is among some values."""
    for leaf in tree_leaves(values):
        for part in plain_tensors(leaf) if isinstance(leaf, Tensor) else ():
            with contextlib.suppress(RuntimeError, NotImplementedError):  # it has none
                yield part.untyped_storage()


def _place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device that a function is asked to use; ``None`` where it is not told one."""
    if func is Tensor.cuda:
        place = kwargs.get("device", args[1] if len(args) > 1 else None)
        return _DEVICE if place is None else place
    if kwargs.get("device") is not None:
        return kwargs["device"]
    kinds = (torch.device, str, int) if func is Tensor.to else torch.device
    for value in args[1:]:
        if isinstance(value, kinds) and not isinstance(value, bool):
            return value
    default = torch.utils._device.CURRENT_DEVICE
    return default if func in torch.utils._device._device_constructors() else None


def _gpu(place: Any) -> torch.device | None:
    """The GPU that a place names; ``None`` where it names none."""
    if isinstance(place, torch.device):
        return place if place.type == "cuda" else None
    if isinstance(place, str):
        named = _CUDA.fullmatch(place)
        return torch.device("cuda", int((named[1] or ":0")[1:])) if named else None
    return torch.device("cuda", place) if isinstance(place, int) else None
