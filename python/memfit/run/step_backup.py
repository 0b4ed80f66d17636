"""What a step may change, as it was before the step.

Responsible for remembering it and for putting it back when the step is to run again. Not
responsible for running anything (:mod:`memfit.run.recovery`).

Put back: the state of the random generators (torch's on the CPU and on every CUDA device in use,
Python's, numpy's), module buffers, the entries of the optimizer's state, its groups' settings.
Parameters and the tensors in the optimizer's state are not copied: that would double what training
takes. They change only when the optimizer runs. Torch counts the changes that its own optimizers
make, but for the fused ones; of the others only the caller knows that they have begun. Where
parameters were or may have been updated there is no way back, and :meth:`BeforeStep.restore` says
so.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.apply.offload.state_view import AwayState
from memfit.apply.remat.randomness import GeneratorState
from memfit.tensors.optimizers import in_memory

LARGE_BYTES = 1 << 20
"""Module buffers from here on are not copied before every step if steps leave them as they are."""


@dataclass(slots=True, frozen=True)
class _Buffer:
    """A module buffer before the step.

    Attributes:
        owner: The dictionary that holds it.
        name: Its name there.
        tensor: The buffer.
        version: Changes that torch had counted.
        copy: Its values; ``None`` where it was not copied.
    """

    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    def is_left_alone(self) -> bool:
        """Whether it is what it was, as far as that can be told."""
        if self.owner.get(self.name) is not self.tensor or self.tensor._version != self.version:
            return False
        # Batch norm writes its statistics without torch counting that as a change.
        return self.copy is None or torch.equal(self.copy, self.tensor)

    def put_back(self) -> None:
        """Make it what it was."""
        self.owner[self.name] = self.tensor
        if self.copy is not None:
            with torch.no_grad():
                self.tensor.copy_(self.copy)


@dataclass(slots=True, frozen=True)
class Generators:
    """The default generators of torch, of Python and, if it is loaded, of numpy, at a moment.

    Attributes:
        of_torch: On the CPU and on every CUDA device in use.
        of_python: That of :mod:`random`.
        of_numpy: ``None`` where it was not loaded.
    """

    of_torch: list[GeneratorState]
    of_python: Any
    of_numpy: Any

    @staticmethod
    def now() -> Generators:
        """As they are now."""
        devices = [torch.device("cpu")]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        numpy = sys.modules.get("numpy")
        of_numpy = numpy.random.get_state() if numpy is not None else None
        of_torch = [GeneratorState.of(device) for device in devices]
        return Generators(of_torch, random.getstate(), of_numpy)

    def put_back(self) -> None:
        """Make them what they were."""
        for state in self.of_torch:
            state.put_back()
        random.setstate(self.of_python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.of_numpy is not None:
            numpy.random.set_state(self.of_numpy)


class Buffers:
    """The module buffers of a model, and which of them need no copy before a step.

    Most are small. The large ones are constants, such as masks: those that the first whole step
    left as they were are not copied again, and looked at when a step is to be put back.
    """

    def __init__(self, model: nn.Module) -> None:
        """Know nothing yet.

        Args:
            model: The model.
        """
        self._model = model
        self._constants: set[tuple[int, str]] | None = None

    def before(self) -> list[_Buffer]:
        """Remember all buffers as they are."""
        constants = self._constants or set()
        found: list[_Buffer] = []
        for module in self._model.modules():
            owner = module._buffers
            for name, tensor in owner.items():
                if tensor is not None:
                    is_constant = (id(owner), name) in constants
                    copy = None if is_constant else tensor.detach().clone()
                    found.append(_Buffer(owner, name, tensor, tensor._version, copy))
        return found

    def after(self, buffers: list[_Buffer]) -> None:
        """Learn from the first whole step which large buffers are constants."""
        if self._constants is None:
            large = [b for b in buffers if b.tensor.nbytes >= LARGE_BYTES]
            self._constants = {(id(b.owner), b.name) for b in large if b.is_left_alone()}

    def put_back(self, buffers: list[_Buffer]) -> str:
        """Make all buffers what they were.

        Args:
            buffers: As :meth:`before` remembered them.

        Returns:
            Why that cannot be, in which case nothing was done; empty where it was.
        """
        uncopied = [b for b in buffers if b.copy is None]
        changed = [b.name for b in uncopied if not b.is_left_alone()]
        if changed:
            return f"the module buffer `{changed[0]}` changed, which the first step had not changed"
        for buffer in buffers:
            buffer.put_back()
        return ""


class BeforeStep:
    """One moment, before a step."""

    def __init__(self, buffers: Buffers, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Remember it.

        Args:
            buffers: The model's buffers.
            model: The model.
            optimizer: Its optimizer.
        """
        self._buffers = buffers
        self._buffers_before = buffers.before()
        self._generators = Generators.now()
        self._optimizer = optimizer
        self._parameters = [(p, p._version) for p in model.parameters()]
        self._state: dict[Any, dict[Any, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        if optimizer is not None:
            self._state = {
                key: entry if isinstance(entry, AwayState) else dict(entry)
                for key, entry in optimizer.state.items()
            }
            self._groups = [dict(group) for group in optimizer.param_groups]
        there = [in_memory(entry) for entry in self._state.values()]
        leaves = tree_leaves([there, self._groups])
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        self._kept = [(tensor, tensor._version) for tensor in tensors.values()]

    def completed(self) -> None:
        """The step ran to its end: learn which buffers it left alone."""
        self._buffers.after(self._buffers_before)

    def restore(self, *, has_begun: bool) -> str:
        """Put everything back.

        Args:
            has_begun: Whether the optimizer may have begun to update parameters.

        Returns:
            Why that cannot be, in which case nothing was done; empty where it was.
        """
        if has_begun and not _counts_changes(self._optimizer):
            kind = type(self._optimizer).__name__
            return f"`{kind}` had begun its step, and torch does not count what it changes"
        updated = sum(p._version != version for p, version in self._parameters)
        if updated:
            return f"{updated} of {len(self._parameters)} parameters were updated by then"
        if any(tensor._version != version for tensor, version in self._kept):
            return "the optimizer's state was updated by then"
        if why := self._buffers.put_back(self._buffers_before):
            return why
        if self._optimizer is not None:
            self._restore_optimizer(self._optimizer)
        self._generators.put_back()
        return ""

    def _restore_optimizer(self, optimizer: Optimizer) -> None:
        for key in [key for key in optimizer.state if key not in self._state]:
            del optimizer.state[key]
        for key, entry in self._state.items():
            if isinstance(entry, AwayState):
                continue  # it moves by itself, and nothing but an update changes what it holds
            optimizer.state[key].clear()
            optimizer.state[key].update(entry)
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)


def _counts_changes(optimizer: Optimizer | None) -> bool:
    """Whether every change that an optimizer makes is counted on the tensor it changes."""
    if optimizer is None:
        return True
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer).__module__.startswith("torch.optim.") and not is_fused
