"""What a recorded step runs on: a copy of the model, the batch and the optimizer.

Responsible for the :class:`Stage` type, for cutting or repeating the batch to a wanted size, and
for naming what existed before the step. Not responsible for making fakes
(:mod:`memfit.capture.stage.fake`) or for running.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from memfit.errors import UsageError
from memfit.workload import Workload


@dataclass
class Stage:
    """A model, a batch and an optimizer that the step may do anything with.

    Attributes:
        workload: What the user described.
        model: A copy of the user's model.
        batch: The batch, or a copy of it.
        optimizer: An optimizer over the copy's parameters, or ``None``.
        fake_mode: The fake mode the copies belong to; ``None`` where they are real.
        real_batch: The real tensors behind a fake batch, for their values.
        real_buffers: The real tensors behind fake module buffers, by qualified name.
        device: ``cpu`` or ``cuda``.
        has_narrow_parameters: Whether parameters were narrowed for a plan that holds them so.
        state_is_lazy: Whether the optimizer makes state for what gets a gradient, and not before.
    """

    workload: Workload
    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None
    fake_mode: FakeTensorMode | None
    real_batch: Any
    real_buffers: dict[str, Tensor]
    device: str = "cpu"
    has_narrow_parameters: bool = False
    state_is_lazy: bool = False

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that may get a gradient, each once, in the model's order."""
        return [p for p in self.model.parameters() if p.requires_grad]


def device_of(model: nn.Module) -> str:
    """Kind of device most of a model is on, ``cpu`` or ``cuda``."""
    kinds = [tensor.device.type for tensor in (*model.parameters(), *model.buffers())]
    return "cuda" if kinds.count("cuda") > len(kinds) // 2 else "cpu"


def batch_entries(batch: Any) -> list[tuple[str, Tensor]]:
    """Tensors of a batch with the path that leads to each.

    Args:
        batch: Any pytree.

    Returns:
        Pairs such as ``("input_ids", tensor)`` or ``("0.x", tensor)``.
    """
    entries = []
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor):
            name = keystr(path).replace("['", ".").replace("']", "")
            name = name.replace("[", ".").replace("]", "").strip(".")
            entries.append((name or "batch", leaf))
    return entries


def resize_batch(batch: Any, size: int, wanted: int, dim: int) -> Any:
    """The batch with another number of examples, cut off or repeated.

    Args:
        batch: Any pytree of tensors and constants.
        size: Number of examples it has.
        wanted: Number of examples it shall have.
        dim: The batch dimension.

    Returns:
        The same structure; resized tensors have storages of their own, and what was one tensor
        stays one tensor.
    """
    if size in {wanted, 0}:
        return batch
    memo: dict[int, Tensor] = {}

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not -leaf.dim() <= dim < leaf.dim():
            return leaf
        if leaf.shape[dim] != size:
            return leaf
        if id(leaf) not in memo:
            memo[id(leaf)] = _resize_tensor(leaf, size, wanted, dim)
        return memo[id(leaf)]

    return tree_map(resize, batch)


def _resize_tensor(tensor: Tensor, size: int, wanted: int, dim: int) -> Tensor:
    repeats = -(-wanted // size)
    source = tensor.detach()
    if repeats > 1:
        source = torch.cat([source] * repeats, dim)
    resized = source.narrow(dim, 0, wanted).clone(memory_format=torch.preserve_format)
    return resized.requires_grad_(tensor.requires_grad)


def build_optimizer(
    workload: Workload, model: nn.Module, convert: Callable[[Tensor], Tensor] | None = None
) -> torch.optim.Optimizer | None:
    """The workload's optimizer over the parameters of a copy of its model.

    Args:
        workload: Names the optimizer, as a factory or as an instance over the user's own model.
        model: The copy.
        convert: Turns a tensor hyperparameter into one the copy can be used with.

    Returns:
        The optimizer, without state; ``None`` when the workload has none.

    Raises:
        UsageError: The optimizer does not belong to the model.
    """
    if workload.optimizer is None:
        return None
    if not isinstance(workload.optimizer, torch.optim.Optimizer):
        optimizer = workload.optimizer(model.parameters())
        if not isinstance(optimizer, torch.optim.Optimizer):
            message = (
                "`optimizer` must return a `torch.optim.Optimizer`, "
                f"got `{type(optimizer).__name__}`"
            )
            raise UsageError(message)
        known = {id(p) for p in model.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            message = (
                "`optimizer` uses parameters other than the ones it is given: "
                "write it as `lambda params: ...`"
            )
            raise UsageError(message)
        return optimizer
    return _rebuild(workload.optimizer, workload.model, model, convert)


def _rebuild(
    original: torch.optim.Optimizer,
    owner: nn.Module,
    model: nn.Module,
    convert: Callable[[Tensor], Tensor] | None,
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over the parameters of a copy."""
    twins = {
        id(mine): theirs
        for mine, theirs in zip(owner.parameters(), model.parameters(), strict=True)
    }

    def setting(value: Any) -> Any:
        if isinstance(value, Tensor):
            return convert(value) if convert is not None else value.clone()
        return value

    groups = []
    for group in original.param_groups:
        missing = sum(id(p) not in twins for p in group["params"])
        if missing:
            message = f"`optimizer` has {missing} parameters that are not parameters of the model"
            raise UsageError(message)
        settings = {name: setting(value) for name, value in group.items() if name != "params"}
        groups.append({**settings, "params": [twins[id(p)] for p in group["params"]]})
    accepted = inspect.signature(type(original).__init__).parameters
    defaults = {
        name: setting(value) for name, value in original.defaults.items() if name in accepted
    }
    try:
        return type(original)(groups, **defaults)
    except (TypeError, ValueError) as error:
        message = (
            f"`{type(original).__name__}` cannot be built again from its settings: "
            "give `optimizer` as a function of the parameters"
        )
        raise UsageError(message) from error


def empty_gradient(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """A gradient of zeros for a first step, which makes the optimizer's state.

    Args:
        optimizer: The optimizer; some take sparse gradients only.
        parameter: The parameter.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros(
            parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo
        )
    return torch.zeros_like(parameter)
