"""What the script holds besides a step: data, other models, what the last step left.

Responsible for the bytes that are live where a model is and that no recorded step knows of. Not
responsible for what a plan makes of them (:mod:`memfit.run.script.recorded_step`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.offload.state_view import whole_state_bytes
from memfit.run.script.observed import Observation
from memfit.run.script.planned_step import Call, Key
from memfit.run.script.step_updates import live_bytes, state_bytes
from memfit.tensors.barrier import without_barrier
from memfit.tensors.optimizers import in_memory
from memfit.tensors.storage import address, gradient_of, plain_tensors

_ROUNDED_TO = 1 << 20
"""Bytes held besides are rounded up to this, so that a few more ask for no new plan."""


class Outside:
    """The bytes that the script holds beside the steps of one loop.

    Attributes:
        held_bytes: What :meth:`bytes_besides` has found last, before it was rounded up.
    """

    def __init__(self, device: torch.device) -> None:
        """Know of no step yet.

        Args:
            device: Where the model is.
        """
        self.held_bytes = 0
        self._device = device
        self._found: list[weakref.ref[Any]] = []
        self._gradients_before: frozenset[int] = frozenset()
        self._consumed_bytes = 0
        self._mapped_input_bytes = 0
        self._input_bytes: dict[Key, int] = {}
        self._resting_state_bytes: dict[Key, int] = {}
        self._state_bytes = 0

    def recorded(self, key: Key, observation: Observation) -> None:
        """A step was recorded: what it read belongs to it from now on."""
        self._input_bytes[key] = observation.input_bytes
        self._resting_state_bytes[key] = observation.resting_state_bytes
        self._found = observation.found
        self._gradients_before = observation.gradients_before
        self._consumed_bytes = observation.consumed_bytes
        self._mapped_input_bytes = observation.mapped_input_bytes

    def is_planned(self, observation: Observation) -> None:
        """A recorded step is about to be planned."""
        if observation.unrecorded is not None:
            # Its state may be elsewhere now, and come home for that plan.
            self._state_bytes = max(self._state_bytes, observation.unrecorded.all_state_bytes)

    def another_comes(self, model: nn.Module) -> None:
        """Another model comes in the place of one that is gone.

        Args:
            model: The other one; its steps begin with all gradients if those before did with any.
        """
        if self._gradients_before:
            self._gradients_before = frozenset(map(id, model.parameters()))

    def bytes_besides(
        self, model: nn.Module, call: Call, optimizers: Iterable[Optimizer], *, is_new: bool
    ) -> int:
        """What is live on the device and not of the step.

        Args:
            model: The model, which is about to run.
            call: What is about to be called in it, and with what.
            optimizers: Those that update it.
            is_new: Whether the state that they have now is that of the recorded step.
        """
        key, inputs = call.key, call.inputs
        tensors: list[Any] = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
        # A gradient that the recorded step began without, as where every second pass adds to those
        # of the one before, is in no plan for it.
        before = self._gradients_before
        tensors.extend(p.grad for p in model.parameters() if id(p) in before)
        # Recorded with the step: another model that it calls, the data that it reads.
        known = self._counted(tensors, self._found)
        optimizers = list(optimizers)
        states = [
            dict(in_memory(state)) for optimizer in optimizers for state in optimizer.state.values()
        ]
        counted = self._counted(tree_leaves(states))
        state = sum(size for place, size in counted.items() if place not in known)
        # State that grew since the step was recorded, as a history does, nobody has planned. What
        # was elsewhere and was loaded anew, say, has not grown.
        whole = whole_state_bytes(it for of in optimizers for it in of.state.values())
        if is_new:
            self._state_bytes = whole
        known[0] = max(state - max(whole - self._state_bytes, 0), 0)
        # Nor that of parameters which such a step does not update.
        known[2] = -self._resting_state_bytes.get(key, 0)
        # The trace has no bytes for inputs that were in files: what is in memory now is besides. So
        # is what they are parts of, where that was less when the step was recorded.
        in_memory_now = sum(self._counted(tree_leaves(inputs)).values())
        was = self._input_bytes.get(key, in_memory_now)
        known[1] = -max(min(in_memory_now, self._mapped_input_bytes), in_memory_now - was)
        # A graph of another model's, say, which the step runs backward through: its trace has that.
        besides = live_bytes(self._device) - sum(known.values()) - self._consumed_bytes
        self.held_bytes = max(besides, 0)
        return -(-self.held_bytes // _ROUNDED_TO) * _ROUNDED_TO

    def _counted(
        self, tensors: Iterable[Any], found: Iterable[weakref.ref[Any]] = ()
    ) -> dict[int, int]:
        """Bytes of tensors, and of storages, that are counted on the device, by address."""
        sizes = {}
        with without_barrier():
            given = (tensor for tensor in tensors if isinstance(tensor, Tensor))
            storages = [
                part.untyped_storage()
                for part in chain.from_iterable(map(plain_tensors, given))
                if part.device == self._device
            ]
            alive = (ref() for ref in found)
            storages += [it for it in alive if it is not None and it.device == self._device]
            for storage in storages:
                place = address(storage)
                # Memory of a mapped file or another process is not counted; what was read is.
                is_counted = place is not None and (
                    self._device.type == "cuda" or _native.is_counted(place)
                )
                if is_counted and place is not None:
                    sizes[place] = storage.nbytes()
        return sizes


def in_files_bytes(others: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> int:
    """What models and optimizers beside those of a step have in files.

    Args:
        others: The models, whose gradients may wait.
        optimizers: The optimizers, whose state may.
    """
    found = (gradient_of(p) for model in others for p in model.parameters())
    gradients = (it.nbytes for it in found if it is not None and not _is_counted(it))
    state = (whole_state_bytes(it.state.values()) - state_bytes(it) for it in optimizers)
    return sum(gradients) + sum(state)


def _is_counted(tensor: Tensor) -> bool:
    """Whether a tensor is in memory that counts."""
    place = None if tensor.layout is not torch.strided else address(tensor.untyped_storage())
    return place is None or tensor.device.type != "cpu" or _native.is_counted(place)
