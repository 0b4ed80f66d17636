"""A model whose pruned channels are zero: what a pruned model has to compute."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from memfit.prune.groups import Group, Removed, tensors_of


def masked(model: nn.Module, groups: Iterable[Group], removed: Removed) -> nn.Module:
    """A copy of the model in which all parameters of the channels are zero."""
    copied = copy.deepcopy(model)
    tensors = tensors_of(copied)
    with torch.no_grad():
        for group, channels in zip(groups, removed, strict=True):
            for member in group.members:
                tensor = tensors[member.name]
                if isinstance(tensor, nn.Parameter):
                    gone = [at for channel in channels for at in member.positions[channel]]
                    positions = member.position_of(tensor.shape[member.dimension])
                    indices = torch.isin(positions, torch.tensor(gone)).nonzero().flatten()
                    tensor.index_fill_(member.dimension, indices, 0.0)
    return copied
