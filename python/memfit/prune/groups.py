"""Groups of channels as the engine found them, and what is left of tensors without some.

Responsible for the types and for turning channels into indices. Not responsible for finding groups
nor for choosing channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Removed = tuple[tuple[int, ...], ...]
"""For each group, its channels that go."""

Kept = dict[str, dict[int, Tensor]]
"""For parameters and buffers by name, for dimensions, the indices that are left, ascending."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the channels of a group have of one dimension of one parameter or buffer.

    Attributes:
        name: The parameter or buffer.
        dimension: Which dimension.
        unit: Elements that go together: 1, or the size of a head.
        count: Positions; element ``x`` is at ``x // unit % count``.
        positions: By channel, its positions.
    """

    name: str
    dimension: int
    unit: int
    count: int
    positions: tuple[tuple[int, ...], ...]

    def position_of(self, size: int) -> Tensor:
        """The position of each element of the dimension.

        Args:
            size: How many elements the dimension has.
        """
        return torch.arange(size) // self.unit % self.count


@dataclass(frozen=True, slots=True)
class Group:
    """Channels of which one can go as well as another.

    Attributes:
        channels: How many.
        members: What they have.
    """

    channels: int
    members: tuple[Member, ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Group:
        """The group from the engine's value.

        Args:
            value: The struct's fields by name.
        """
        members = (
            Member(**{**member, "positions": tuple(map(tuple, member["positions"]))})
            for member in value["members"]
        )
        return cls(value["channels"], tuple(members))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name they have.

    Args:
        model: The model.
    """
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def removal(groups: Iterable[Group], scores: Sequence[Tensor], share: float) -> Removed:
    """The channels with the lowest scores: of each group the same share, and never all.

    Args:
        groups: The groups.
        scores: For each group, one number for each channel.
        share: What part goes, from 0 to 1.
    """
    return tuple(
        tuple(sorted(torch.argsort(score, stable=True)[: _count(group, share)].tolist()))
        for group, score in zip(groups, scores, strict=True)
    )


def _count(group: Group, share: float) -> int:
    """How many go: no fewer than the share, but for heads, which are few and large.

    Small groups are often those with large activations.
    """
    part = group.channels * share
    is_of_heads = all(member.unit > 1 for member in group.members)
    count = int(part + 1e-9) if is_of_heads else math.ceil(part - 1e-9)
    return min(count, group.channels - 1)


def kept(groups: Sequence[Group], removed: Removed, shapes: Mapping[str, Sequence[int]]) -> Kept:
    """What is left of each parameter and buffer that loses anything.

    Args:
        groups: The groups.
        removed: For each, the channels that go.
        shapes: Shapes of all parameters and buffers, by name.
    """
    masks: dict[tuple[str, int], Tensor] = {}
    for member, positions in _gone(groups, removed):
        size = shapes[member.name][member.dimension]
        mask = masks.setdefault((member.name, member.dimension), torch.ones(size, dtype=torch.bool))
        mask &= ~torch.isin(member.position_of(size), positions)
    left: Kept = {}
    for (name, dimension), mask in masks.items():
        left.setdefault(name, {})[dimension] = mask.nonzero().flatten()
    return left


def _gone(groups: Sequence[Group], removed: Removed) -> Iterator[tuple[Member, Tensor]]:
    for group, channels in zip(groups, removed, strict=True):
        if channels:
            for member in group.members:
                gone = [position for channel in channels for position in member.positions[channel]]
                yield member, torch.tensor(gone)


def elements(model: nn.Module, left: Kept) -> int:
    """How many numbers the parameters have, each once, without what goes.

    Args:
        model: The model.
        left: What is left of its tensors.
    """
    dimensions = {
        id(tensor): left[name] for name, tensor in tensors_of(model).items() if name in left
    }
    return sum(
        math.prod(cut_shape(parameter.shape, dimensions.get(id(parameter), {})))
        for parameter in model.parameters()
    )


def cut_shape(shape: Sequence[int], dimensions: Mapping[int, Tensor]) -> list[int]:
    """A shape of which some dimensions have fewer indices.

    Args:
        shape: The shape.
        dimensions: For dimensions, the indices that are left.
    """
    return [len(dimensions[at]) if at in dimensions else size for at, size in enumerate(shape)]
