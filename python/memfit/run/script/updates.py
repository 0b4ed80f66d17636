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
from memfit.run.script.sparse_updates import sparse_refusal, values_of
from memfit.run.script.update_needs import UpdateNeeds
from memfit.tensors.optimizers import in_memory, shared_state, step_of_others, unknown_optimizer
from memfit.tensors.storage import gradient_of


def refusal(root: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """Why the state of a model's optimizer has to stay; ``None`` where it may go.

    Args:
        root: The model.
        optimizers: Those that update it.
    """
    if len(optimizers) != 1:
        return "the model is updated by no optimizer, or by several"
    (optimizer,) = optimizers
    if others := step_of_others(optimizer):
        return others
    own = {id(parameter) for parameter in root.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        return "the optimizer updates parameters that are not the model's"
    return sparse_refusal(optimizer) or unknown_optimizer(optimizer) or shared_state(optimizer)


def updates_of(
    optimizer: Optimizer,
    allocation_of: Callable[[Tensor], int],
    needs: UpdateNeeds,
    ready: Mapping[int, int],
    *,
    with_state: bool,
) -> list[Update]:
    """What a step that has just ended updated, in the order of the optimizer's groups.

    Args:
        optimizer: The optimizer.
        allocation_of: The allocation of a tensor.
        needs: What its updates take.
        ready: Where the gradient of a parameter was complete, by its ``id``.
        with_state: Whether the recording knows the optimizer's state.
    """
    updates = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = gradient_of(parameter)
        if gradient is None or id(parameter) not in needs.alone:
            continue
        temporary_bytes, moved_bytes = needs.alone[id(parameter)]
        state = optimizer.state.get(parameter, {}) if with_state else {}
        leaves = tree_leaves(dict(in_memory(state)))
        updates.append(
            Update(
                allocation_of(parameter),
                allocation_of(values_of(gradient)),
                ready=ready.get(id(parameter), 0),
                temporary_bytes=temporary_bytes,
                moved_bytes=moved_bytes,
                state=[allocation_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)],
            )
        )
    return updates


def forget_state(trace: dict[str, Any], optimizer_state: set[int]) -> None:
    """Count no state that was there when the recording began: it comes with the step that is added.

    Args:
        trace: The trace as parsed JSON.
        optimizer_state: Allocations of that state.
    """
    for index in optimizer_state:
        trace["allocations"][index]["bytes"] = 0


def in_slices(trace: dict[str, Any], slices: Mapping[int, int]) -> dict[str, Any]:
    """A step whose optimizer has the state of a slice of a parameter in memory at a time.

    Each slice is an update of its own, with its share of the state: so it comes and goes alone.

    Args:
        trace: The trace as parsed JSON; it stays as it is.
        slices: In how many slices parameters are updated, by allocation.
    """
    cut = {**trace, "allocations": [dict(one) for one in trace["allocations"]], "updates": []}
    end = len(trace["ops"])
    for update in trace["updates"]:
        count = slices.get(update["parameter"], 1)
        held = update.get("state", [])  # the engine writes none where it is empty
        large = [i for i in held if trace["allocations"][i]["bytes"] >= _CUT_BYTES]
        if count == 1 or not large:
            cut["updates"].append(update)
            continue
        sizes = [-(-trace["allocations"][i]["bytes"] // count) for i in large]
        for i in large:
            cut["allocations"][i]["bytes"] = 0
        rest = [i for i in held if i not in large]
        for number in range(count):
            own = [_state(cut, size, end) for size in sizes]
            moved = update["moved_bytes"] // count
            state = [*own, *(rest if number == 0 else ())]
            cut["updates"].append({**update, "state": state, "moved_bytes": moved})
    return cut


_CUT_BYTES = 1 << 16
"""Smaller tensors of the state are not those that have an element for each of the parameter's."""


def add_unrecorded_step(
    trace: dict[str, Any], needs: UpdateNeeds, parameters: Mapping[int, int]
) -> None:
    """Add an optimizer's step that was not recorded, since memfit made the updates.

    Args:
        trace: The trace as parsed JSON, without ops of the optimizer.
        needs: What the updates take.
        parameters: The ``id`` of the parameter of an allocation.
    """
    end = len(trace["ops"]) + 1
    for update in trace["updates"]:
        update["state"] = [
            _state(trace, size, end) for size in needs.state_bytes[parameters[update["parameter"]]]
        ]
    owners = {update["parameter"] for update in trace["updates"]}
    values = [i for i, value in enumerate(trace["values"]) if value["allocation"] in owners]
    for allocation in trace["allocations"]:
        # What was there to the end of the recording is there while the optimizer runs, too.
        allocation["natural"] = [
            [start, end if stop == end - 1 else stop] for start, stop in allocation["natural"]
        ]
    strings = trace["strings"]
    strings.append("memfit.optimizer_step")
    trace["ops"].append(
        {
            **_NO_OP,
            "name": len(strings) - 1,
            "reads": values[:1],
            "moved_bytes": sum(update["moved_bytes"] for update in trace["updates"]),
            "workspace_bytes": needs.together_bytes,
        }
    )


_NO_OP: dict[str, Any] = {
    "phase": "optimizer",
    "module": 0,
    "source": 0,
    "arguments": 0,
    "node": None,
    "writes": [],
    "outputs": [],
    "flops": 0,
    "random": False,
    "view": False,
    "replayable": False,
    "shape_only": False,
}


def _state(trace: dict[str, Any], size_bytes: int, end: int) -> int:
    trace["allocations"].append(
        {
            "bytes": size_bytes,
            "device": 0,
            "category": "optimizer_state",
            "producer": None,
            "natural": [[0, end]],
            "name": 0,
            "law": None,
        }
    )
    return len(trace["allocations"]) - 1
