"""The script's own optimizer step, taken parameter by parameter with its state elsewhere.

Responsible for what a recorded step says of its updates, and for standing in for the updates of
``optimizer.step()``. Not responsible for where the state goes and comes
(:mod:`memfit.apply.offload_optimizer`) nor for seeing that the script steps
(:mod:`memfit.adopt.signals`).

The script calls the optimizer; torch's hooks tell of it before and after. Before, all updates are
made; until after, the optimizer lists no parameter. So the step that the script called finds
nothing to do, and whoever watches the optimizer sees one step, as ever. Where a step is not stood
in for (it has a closure, say), the optimizer reads its state, and what is read is at home.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.apply.offload_optimizer import StateDirections, StateElsewhere
from memfit.capture.emit import Update
from memfit.capture.optimizer_updates import shared_state, unknown_optimizer

KIND = "offload_optimizer"
"""The kind of action that keeps state elsewhere."""


def refusal(root: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """Why the state of a model's optimizer has to stay; ``None`` where it may go.

    Args:
        root: The model.
        optimizers: Those that update it.
    """
    if len(optimizers) != 1:
        return f"{len(optimizers)} optimizers update the model"
    (optimizer,) = optimizers
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"`{type(optimizer).__name__}` has step hooks"
    own = {id(parameter) for parameter in root.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        return "the optimizer updates parameters that are not the model's"
    return unknown_optimizer(optimizer) or shared_state(optimizer)


def updates_of(optimizer: Optimizer, allocation_of: Callable[[Tensor], int]) -> list[Update]:
    """What a step that has just ended updated, in the order of the optimizer's groups.

    Args:
        optimizer: The optimizer.
        allocation_of: The allocation of a tensor.
    """
    updates = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is None:
            continue
        leaves = tree_leaves(dict(optimizer.state.get(parameter, {})))
        held = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        moved = 3 * parameter.nbytes + 2 * sum(tensor.nbytes for tensor in held)
        updates.append(
            Update(
                allocation_of(parameter),
                allocation_of(parameter.grad),
                ready=0,  # all gradients are there before the first update
                moved_bytes=moved,
                state=[allocation_of(tensor) for tensor in held],
            )
        )
    return updates


def temporaries_bytes(trace: Mapping[str, Any]) -> int:
    """Most bytes of temporaries at once while the recorded optimizer ran: no update takes more.

    Args:
        trace: The trace as parsed JSON.
    """
    ops = trace["ops"]
    start = next((i for i, op in enumerate(ops) if op["phase"] == "optimizer"), len(ops))
    change = [0] * (len(ops) + 2)
    for allocation in trace["allocations"]:
        producer = allocation["producer"]
        if producer is not None and producer >= start:
            for first, end in allocation["natural"]:
                change[first] += allocation["bytes"]
                change[end] -= allocation["bytes"]
    alive = most = 0
    for index in range(start, len(ops)):
        alive += change[index]
        most = max(most, alive + ops[index]["workspace_bytes"])
    return most


class ScriptUpdates:
    """Keeps the state of the script's optimizer elsewhere between its steps."""

    def __init__(self, optimizer: Optimizer, root: nn.Module, directions: StateDirections) -> None:
        """Make the place ready; nothing goes before :meth:`send_all`.

        Args:
            optimizer: The script's optimizer.
            root: The model.
            directions: What the plan says.

        Raises:
            UsageError: The optimizer cannot run parameter by parameter.
            OffloadError: The folder cannot be used.
        """
        self.optimizer = optimizer
        self.directions = directions
        self._state = StateElsewhere(optimizer, root, directions)
        self._over_nothing: contextlib.ExitStack | None = None

    def send_all(self) -> None:
        """Have everything go that is at home.

        Raises:
            OffloadError: Some of it cannot be written. It is at home, and whole.
        """
        self._state.send_all()

    def step_begins(self) -> None:
        """Make all updates, and leave nothing to the step that the script has called.

        Raises:
            OffloadError: State did not come back as it went.
        """
        self.step_ended()
        updated = self._state.update_all()
        self._over_nothing = contextlib.ExitStack()
        self._over_nothing.enter_context(updated.over_nothing())

    def step_ended(self) -> None:
        """The step that the script has called is over: its optimizer is as it was."""
        over_nothing, self._over_nothing = self._over_nothing, None
        if over_nothing is not None:
            over_nothing.close()
