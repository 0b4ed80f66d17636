"""What a recorded step says of its updates.

Responsible for which of them can run parameter by parameter, with what they hold and move. Not
responsible for running them so (:mod:`memfit.run.script.stand_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.capture.record.roles import Update
from memfit.tensors.optimizers import shared_state, step_of_others, unknown_optimizer


def refusal(root: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """Why the state of a model's optimizer has to stay; ``None`` where it may go.

    Args:
        root: The model.
        optimizers: Those that update it.
    """
    if len(optimizers) != 1:
        return f"{len(optimizers)} optimizers update the model"
    (optimizer,) = optimizers
    if others := step_of_others(optimizer):
        return others
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
