"""One device, where a target asks for several.

Responsible for noticing which GPUs a target or a step asks for, and for refusing the second: what
memfit predicts and plans is the memory of one device. Not responsible for pretending a GPU that is
not there (:mod:`memfit.weights.absent_gpu`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError


class SeveralDevicesError(UsageError):
    """More than one GPU is asked for."""


class AskedGpus:
    """The GPUs that were asked for so far."""

    def __init__(self, what: str) -> None:
        """Begin with none.

        Args:
            what: Who asks, for the error: ``the target``.
        """
        self._what = what
        self._indices: set[int] = set()

    def ask(self, device: torch.device) -> None:
        """Note a device; one without an index is the first GPU, and other kinds do not count.

        Raises:
            SeveralDevicesError: Another GPU was asked for before.
        """
        if device.type != "cuda":
            return
        self._indices.add(device.index or 0)
        if len(self._indices) > 1:
            _refuse(self._what, (f"cuda:{index}" for index in self._indices))


def refuse_several(model: nn.Module) -> None:
    """Refuse a model that lies on several devices, or was spread over them by a ``device_map``.

    Raises:
        SeveralDevicesError: It does.
    """
    found = {str(tensor.device) for tensor in model.parameters() if tensor.device.type == "cuda"}
    for module in model.modules():
        spread: Any = getattr(module, "hf_device_map", None)
        if isinstance(spread, Mapping):
            found.update(str(_named(place)) for place in spread.values())
    gpus = {name for name in found if name.startswith("cuda")}
    if len(gpus) > 1:
        _refuse("the model", gpus)


def _named(place: Any) -> Any:
    """A place as a ``device_map`` has it: a GPU by its index, or the name of any other."""
    return f"cuda:{place}" if isinstance(place, int) else place


def _refuse(what: str, gpus: Iterable[str]) -> None:
    names = ", ".join(f"`{name}`" for name in sorted(gpus))
    error = SeveralDevicesError(f"memfit plans one device today, and {what} asks for {names}")
    error.add_note(
        'put all of it on one (`device_map={"": 0}`), or leave devices out and give '
        "`--device cuda`, which needs no GPU"
    )
    raise error
