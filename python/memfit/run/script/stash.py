"""Gradients of a recorded step, elsewhere until backward is over.

Responsible for taking the memory of a gradient that is complete, and for giving it back, bit for
bit, before anyone can read it. Not responsible for what autograd saves
(:mod:`memfit.run.script.observed`).

A recorded step keeps no activation in memory; towards the end of backward, gradients are most of
what it holds, and nobody needs them before the optimizer. One is given back at the end of backward,
before something is added to it, and when anyone asks for it in Python (``parameter.grad``). Only a
gradient is taken that this step made and whose memory nothing else holds.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memfit.run.script.gradients import GradientLooks
from memfit.run.script.spill import InFile, SpillFile
from memfit.tensors.storage import gradient_of, has_others

LEAST_BYTES = 1 << 16
"""Smaller gradients stay."""


class GradientStash:
    """The gradients of one recorded step."""

    def __init__(self, spill: SpillFile) -> None:
        """Take none yet.

        Args:
            spill: Where they go.
        """
        self._spill = spill
        self._looks = GradientLooks()
        self._looks.on_read = self._is_read
        self._looks.on_look = lambda parameter: self._watched.discard(id(parameter))  # may be kept
        self._away: dict[int, tuple[torch.UntypedStorage, InFile]] = {}
        self._watched: set[int] = set()
        self._is_on = False
        self._earlier: dict[int, weakref.ref[Any]] = {}
        self._hooks = contextlib.ExitStack()

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take gradients of these as they come.

        Args:
            parameters: Parameters of the model.
        """
        for parameter in parameters:
            if type(parameter) is not nn.Parameter or not parameter.requires_grad:
                continue
            self._watched.add(id(parameter))
            handle = parameter.register_hook(self._before(id(parameter)))  # type: ignore[no-untyped-call]
            self._hooks.callback(handle.remove)
            gradient = gradient_of(parameter)
            if gradient is not None and type(gradient) is Tensor and _is_plain(gradient):
                self._earlier[id(parameter)] = weakref.ref(gradient.untyped_storage())

    def begin(self) -> None:
        """Backward begins; until it is over, looks at gradients are seen."""
        if self._watched:
            self._is_on = True
            self._looks.install()

    def complete(self, parameter: Tensor) -> None:
        """A gradient is complete for now.

        Args:
            parameter: Its parameter.
        """
        if not self._is_on or id(parameter) not in self._watched:
            return
        gradient = gradient_of(parameter)
        if gradient is None or type(gradient) is not Tensor or not _is_plain(gradient):
            return
        with torch._C._DisableTorchDispatch():
            storage = gradient.untyped_storage()
            del gradient
            size = storage.nbytes()
            earlier = self._earlier.get(id(parameter))
            if earlier is not None and earlier() is storage:
                return  # somebody may have it since
            if size < LEAST_BYTES or has_others(storage, tensors=1):
                return
            kept = self._spill.away(storage)
            if kept is not None:
                self._away[id(parameter)] = (storage, kept)
                storage.resize_(0)

    def bring_back(self) -> None:
        """Give all back: backward is over, or one inside another.

        Raises:
            OSError: One cannot be read. Looks stay seen: no memory is behind that gradient, and
                whoever asks for it is told so too.
        """
        self._is_on = False
        for key in list(self._away):
            self._back(key)
        self._looks.remove()

    def close(self) -> None:
        """Give all back, and take no more."""
        self._watched.clear()
        self.bring_back()
        self._hooks.close()

    def _before(self, key: int) -> Any:
        def adds(_gradient: Tensor) -> None:
            self._back(key)

        return adds

    def _is_read(self, parameter: Tensor) -> None:
        away = self._away.get(id(parameter))
        if away is None:
            return
        gradient = gradient_of(parameter)
        if gradient is not None:
            with torch._C._DisableTorchDispatch():
                is_away = gradient.untyped_storage() is away[0]
            if is_away:  # else another parameter has come where one was that has gone
                self._back(id(parameter))

    def _back(self, key: int) -> None:
        away = self._away.get(key)
        if away is None:
            return
        storage, kept = away
        with torch._C._DisableTorchDispatch():
            kept.give_back(storage)
        self._away.pop(key, None)  # last: an interrupt may have come before


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.device.type == "cpu"
