"""The device that a pool is of.

Responsible for its name, which is the broker's, and for refusing models that lie elsewhere. Not
responsible for its memory (:mod:`memfit.share.park`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from memfit.errors import ParkError, UsageError
from memfit.guard import cuda_limit
from memfit.share.lease import Lease
from memfit.share.park import layout

HOST = "host"


def device_of(device: str | torch.device | None, lease: Lease | None) -> str:
    """Name the device of a pool.

    Args:
        device: As a person names it; ``None`` for the lease's only device, else the host.
        lease: The pool's lease, if it has one.

    Returns:
        ``host`` or ``cuda:0``.

    Raises:
        UsageError: There is no such device here, or none for pools.
    """
    if device is None:
        held = [] if lease is None else list(lease.claims)
        device = held[0] if len(held) == 1 else HOST
    if device == HOST:
        return HOST
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        message = f"`{device}` is no device: name `{HOST}` or `cuda:0`"
        raise UsageError(message) from error
    if where.type == "cpu":
        return HOST
    if where.type != "cuda":
        message = f"a pool is of models on the host or on a CUDA device, not on `{where}`"
        raise UsageError(message)
    return str(cuda_limit.existing(where))


def check(name: str, model: nn.Module, leave: Collection[str], device: str) -> None:
    """Refuse a model that does not lie on the pool's device.

    What a model on a GPU has on the host stays there, as where it is parked alone.

    Args:
        name: What to call the model.
        model: The model.
        leave: Names of tensors that do not matter.
        device: The pool's device.

    Raises:
        ParkError: A tensor lies elsewhere; it is named.
    """
    found = [(place_of(member.tensor), member) for member in layout.members(model, leave)]
    on_gpus = [(place, member) for place, member in found if place != HOST]
    for place, member in on_gpus or found:
        if place == device:
            continue
        target = "cpu" if device == HOST else device
        hint = f'move the model with `model.to("{target}")`'
        if place.startswith("cuda"):
            hint += f', or make a pool of that device: `memfit.Pool(..., device="{place}")`'
        first = member.names[0]
        message = (
            f"cannot add `{name}`: `{first}` is on `{place}`, and the pool is of models on "
            f"`{device}`\nhint: {hint}"
        )
        raise ParkError(message, "unsupported", first)


def place_of(tensor: Tensor) -> str:
    """Where a tensor lies, as the broker names devices."""
    return HOST if tensor.device.type == "cpu" else str(tensor.device)
