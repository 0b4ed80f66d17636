"""Gradients of a recorded step, elsewhere until they are used.

Responsible for taking the memory of a gradient that is complete, and for giving it back, bit for
bit, before anyone can read it. Not responsible for what autograd saves
(:mod:`memfit.run.script.script_recorder`).

A recorded step keeps no activation in memory; towards the end of backward, gradients are most of
what it holds, and nobody needs them before the optimizer. One is given back before something is
added to it, and when anyone asks for it in Python (``parameter.grad``). Only a gradient is taken
that this step made and whose memory nothing else holds.

An optimizer asks for all gradients before its first update. Where memfit makes the updates one by
one, it asks for one at a time: when it asks for the next, the last one has been used, and goes to a
mapped file for who may still read it (:mod:`memfit.run.script.gradients_between`). Where no such
file may be, all are given back at the end of backward.

The rows of a sparse gradient go to a mapped file at once and stay there, where readers find them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memfit.apply.offload.mapped import (
    OF_GRADIENT,
    Moves,
    is_lent,
    may_go,
    rows_may_go,
    rows_to_file,
    to_file,
)
from memfit.run.script.gradients import GradientLooks
from memfit.run.script.gradients_between import fetch
from memfit.run.script.sparse_updates import values_of
from memfit.run.script.spill import InFile, SpillFile
from memfit.tensors.storage import gradient_of, has_others, is_fixed
from memfit.torch_versions import allow_reads, forbid_reads, offloaded_parameters_refusal

LEAST_BYTES = 1 << 16
"""Smaller gradients stay."""


class _Away(NamedTuple):
    """A gradient without memory."""

    storage: torch.UntypedStorage
    kept: InFile
    parameter: weakref.ref[Tensor]


class GradientStash:
    """The gradients of one recorded step.

    Attributes:
        place: Where mapped files may be; empty for nowhere.
        adding: The ``id`` of parameters whose gradients it has in memory before they are added to,
            wherever they were: those of the step before wait in mapped files, perhaps.
    """

    def __init__(self, spill: SpillFile, moves: Moves | None = None) -> None:
        """Take none yet.

        Args:
            spill: Where they go.
            moves: Told of each before a mapped file is its memory; ``None`` for nobody.
        """
        self.place = ""
        self.adding: set[int] = set()
        self._spill = spill
        self._moves = moves
        self._can_forbid = offloaded_parameters_refusal() is None
        self._updates = False
        self._used: weakref.ref[Tensor] | None = None
        self._looks = GradientLooks()
        self._looks.on_read = self._is_read
        self._looks.on_look = lambda parameter: self._watched.discard(id(parameter))  # may be kept
        self._away: dict[int, _Away] = {}
        self._rows: dict[int, tuple[weakref.ref[Tensor], int]] = {}
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
            self.adding.add(id(parameter))
            handle = parameter.register_hook(self._before(parameter))  # type: ignore[no-untyped-call]
            self._hooks.callback(handle.remove)
            gradient = gradient_of(parameter)
            if gradient is not None and type(gradient) is Tensor and _is_plain(gradient):
                self._earlier[id(parameter)] = weakref.ref(gradient.untyped_storage())

    def watch_others(self, parameters: Iterable[Tensor]) -> None:
        """Take those of other models too, which the loss of this one is computed with.

        An actor's leads through critics, a generator's through a discriminator: both get gradients
        that nothing uses.

        Args:
            parameters: Of models that the step does not update.
        """
        others = [it for it in parameters if it.is_leaf and id(it) not in self._watched]
        self.watch(others)
        for parameter in others:
            if id(parameter) in self._watched:
                handle = parameter.register_post_accumulate_grad_hook(self.complete)  # type: ignore[no-untyped-call]
                self._hooks.callback(handle.remove)

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
        if gradient is not None and self.place and rows_may_go(gradient):
            with contextlib.suppress(OSError, RuntimeError):  # they stay in memory
                rows_to_file(gradient, self.place, self._moves)
                self._rows[id(parameter)] = weakref.ref(gradient), values_of(gradient).nbytes
        if gradient is None or type(gradient) is not Tensor or not _is_plain(gradient):
            return
        with torch._C._DisableTorchDispatch():
            storage = gradient.untyped_storage()
            is_mapped = is_fixed(gradient)
            del gradient
            size = storage.nbytes()
            earlier = self._earlier.get(id(parameter))
            if is_mapped or (earlier is not None and earlier() is storage):
                return  # somebody may have it since
            if size < LEAST_BYTES or has_others(storage, tensors=1):
                return
            kept = self._spill.away(storage)
            if kept is not None:
                self._away[id(parameter)] = _Away(storage, kept, weakref.ref(parameter))
                storage.resize_(0)
                if self._can_forbid:
                    forbid_reads(storage, "this gradient is offloaded by memfit until it is read")

    @property
    def away_bytes(self) -> tuple[int, int]:
        """Bytes of all that have no memory now, and of the largest that is to come back."""
        sizes = [away.kept.bytes for away in self._away.values()]
        rows = sum(size for gradient, size in self._rows.values() if gradient() is not None)
        return sum(sizes) + rows, max(sizes, default=0)

    def backward_ended(self) -> None:
        """Take no more; give all back, unless they may wait for who asks.

        Raises:
            OSError: As :meth:`bring_back`.
        """
        self._is_on = False
        if not self.place:
            self.bring_back()

    def updates_begin(self) -> None:
        """From here on to :meth:`close`, gradients are used one after the other."""
        self._updates = True

    def bring_back(self) -> None:
        """Give all back.

        Raises:
            OSError: One cannot be read. Looks stay seen: no memory is behind that gradient, and
                whoever asks for it is told so too.
        """
        self._is_on = False
        for key in list(self._away):
            self._back(key)
        self._looks.remove()

    def close(self) -> None:
        """Give all back, in mapped files where updates came one by one, and take no more.

        Raises:
            OSError: As :meth:`bring_back`.
        """
        self._watched.clear()
        unused = [away.parameter for away in self._away.values()] if self._updates else []
        for of in unused:
            parameter = of()
            if parameter is not None:
                self._is_read(parameter)
        self._let_go()
        self.bring_back()
        self._hooks.close()

    def _before(self, parameter: Tensor) -> Any:
        key, of = id(parameter), weakref.ref(parameter)

        def adds(_gradient: Tensor) -> None:
            self._back(key)
            fetch(of(), self._moves)

        return adds

    def _is_read(self, parameter: Tensor) -> None:
        away = self._away.get(id(parameter))
        if away is None:
            return
        gradient = gradient_of(parameter)
        if gradient is not None:
            with torch._C._DisableTorchDispatch():
                is_away = gradient.untyped_storage() is away[0]
            del gradient
            if is_away:  # else another parameter has come where one was that has gone
                self._let_go()
                self._back(id(parameter))
                self._used = away.parameter if self._updates else None

    def _let_go(self) -> None:
        """Have the gradient in a mapped file that was used last."""
        used, self._used = self._used, None
        parameter = None if used is None else used()
        gradient = None if parameter is None else gradient_of(parameter)
        if gradient is None or not self.place or is_lent(gradient, OF_GRADIENT):
            return
        if may_go(gradient):
            with contextlib.suppress(OSError, RuntimeError):  # it stays in memory
                to_file(gradient, self.place, self._moves)

    def _back(self, key: int) -> None:
        away = self._away.get(key)
        if away is None:
            return
        with torch._C._DisableTorchDispatch():
            if self._can_forbid:
                allow_reads(away.storage)
            away.kept.give_back(away.storage)
        self._away.pop(key, None)  # last: an interrupt may have come before


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.device.type == "cpu"
