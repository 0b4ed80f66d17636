"""What channels are worth.

Responsible for one number for each channel: the lower, the less the model should miss it. Not
responsible for how many go.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from memfit.errors import UsageError, WorkloadError
from memfit.prune.groups import Group, tensors_of
from memfit.weights.weightless import require_weights
from memfit.workload import Workload

Scores = Literal["magnitude", "taylor"]
"""``magnitude``: the squares of a channel's parameters, summed. ``taylor``: parameter times
gradient of one batch, by size and summed: what the loss would be off by, to first order."""


def scored(workload: Workload, groups: Sequence[Group], scores: Scores) -> list[Tensor]:
    """One number for each channel of each group.

    Args:
        workload: The step; it stays as it is. Taylor scores run forward and backward of it on a
            copy of the model, which takes what an unplanned step takes.
        groups: The groups.
        scores: Which numbers.

    Raises:
        UsageError: There are no such scores, or no loss to have gradients of.
        WorkloadError: The step fails.
        WeightsNeededError: The model was built without weights.
    """
    require_scores(workload, scores)
    require_weights(workload, f"{scores} scores need the values of weights")
    worth = _taylor(workload) if scores == "taylor" else _squares(workload.model)
    return [_of_group(group, worth) for group in groups]


def require_scores(workload: Workload, scores: str) -> None:
    """Refuse scores that there are not.

    Args:
        workload: The step.
        scores: Which scores.

    Raises:
        UsageError: There are no such scores, or no loss to have gradients of.
    """
    if scores not in get_args(Scores):
        names = " or ".join(f"`{name}`" for name in get_args(Scores))
        raise UsageError(f"there are no scores `{scores}`: write {names}")
    if scores == "taylor" and workload.loss is None:
        raise UsageError("`taylor` scores need gradients, and the step has no loss")


Worth = Callable[[str], Tensor | None]
"""For a parameter by name, what each of its elements is worth; ``None`` for a buffer."""


def _squares(model: nn.Module) -> Worth:
    tensors = tensors_of(model)

    def worth(name: str) -> Tensor | None:
        tensor = tensors[name]
        return tensor.detach().float().square() if isinstance(tensor, nn.Parameter) else None

    return worth


def _taylor(workload: Workload) -> Worth:
    tensors = tensors_of(workload.model)
    gradients = _gradients(workload)

    def worth(name: str) -> Tensor | None:
        tensor, gradient = tensors[name], gradients.get(name)
        if gradient is None or not isinstance(tensor, nn.Parameter):
            return None
        return (tensor.detach().float() * gradient.float()).abs()

    return worth


def _gradients(workload: Workload) -> Mapping[str, Tensor]:
    """Gradients of one step's loss by every name of each parameter."""
    assert workload.loss is not None
    model = copy.deepcopy(workload.model)
    for parameter in model.parameters():
        parameter.grad = None
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if workload.autocast is not None:
        around = torch.autocast(device.type, workload.autocast)
    with torch.random.fork_rng(devices):
        try:
            with around:
                loss = workload.loss(model, workload.batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            message = f"the step failed by itself: {type(error).__name__}"
            raise WorkloadError(message, phase="forward") from error
    named = model.named_parameters(remove_duplicate=False)
    return {name: it.grad for name, it in named if it.grad is not None}


def _of_group(group: Group, worth: Worth) -> Tensor:
    total = torch.zeros(group.channels, dtype=torch.float64)
    for member in group.members:
        values = worth(member.name)
        if values is None:
            continue
        others = [at for at in range(values.dim()) if at != member.dimension]
        along = (values.sum(others) if others else values).double().cpu()
        by_position = torch.zeros(member.count, dtype=torch.float64)
        by_position.index_add_(0, member.position_of(len(along)), along)
        channel = [at for at, some in enumerate(member.positions) for _ in some]
        position = [one for some in member.positions for one in some]
        total.index_add_(0, torch.tensor(channel), by_position[torch.tensor(position)])
    return total
