"""Numbers that modules note of their sizes, after their parameters were cut.

Responsible for the attributes of torch's layers, which follow from the shapes of their own
parameters, and for counts and widths of heads, which follow from how many heads are left. Not
responsible for whether that is enough: the pruned step is recorded again and compared, and heads
whose module says its sizes in another way stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from memfit.prune.groups import Group, Removed

Shape = Sequence[int]

Noted = dict[str, dict[str, Any]]
"""For modules by path, attributes and their values."""

OF_HEADS = frozenset(
    {
        # counts
        "heads",
        "n_head",
        "n_heads",
        "n_kv_heads",
        "num_attention_heads",
        "num_heads",
        "num_key_value_heads",
        "num_kv_heads",
        # widths of all heads together
        "all_head_size",
        "attn_dim",
        "inner_dim",
        "inner_kv_dim",
        "kv_dim",
        "split_size",
    }
)
"""Attributes of modules with heads that are in proportion to how many there are."""


def mended(
    model: nn.Module, cut_model: nn.Module, groups: Iterable[Group], removed: Removed
) -> Noted:
    """Mend a copy's attributes.

    Args:
        model: The model before.
        cut_model: Its copy with cut parameters, whose attributes are set.
        groups: The groups.
        removed: For each, the channels that went.

    Returns:
        What was set.
    """
    noted: Noted = {}
    for path, (before, after) in _pairs(model, cut_model):
        found = _of_layer(before, after)
        if found:
            noted[path] = found
    for group, gone in zip(groups, removed, strict=True):
        if gone:
            for path, attributes in _of_heads(model, group, len(gone)).items():
                noted.setdefault(path, {}).update(attributes)
    set_noted(cut_model, noted)
    return noted


def set_noted(model: nn.Module, noted: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes of modules.

    Args:
        model: The model.
        noted: For modules by path, attributes and their values.
    """
    for path, attributes in noted.items():
        module = model.get_submodule(path)
        for name, value in attributes.items():
            setattr(module, name, value)


def _pairs(
    model: nn.Module, cut_model: nn.Module
) -> Iterable[tuple[str, tuple[nn.Module, nn.Module]]]:
    copies = dict(cut_model.named_modules())
    return ((path, (module, copies[path])) for path, module in model.named_modules())


def _of_layer(before: nn.Module, after: nn.Module) -> dict[str, Any]:
    """The attributes of a layer of torch's, or one like it, whose parameters were cut."""
    was = {name: tensor.shape for name, tensor in _own(before).items()}
    now = {name: tensor.shape for name, tensor in _own(after).items()}
    if was == now:
        return {}
    weight = now.get("weight")
    if isinstance(before, _NormBase):
        return {"num_features": next(shape[0] for shape in now.values() if shape)}
    of_weight = _OF_WEIGHT.get(_kind(before))
    if weight is None or of_weight is None:
        return {}
    return of_weight(before, was["weight"], weight)


def _of_linear(_: nn.Module, __: Shape, weight: Shape) -> dict[str, Any]:
    return {"out_features": weight[0], "in_features": weight[1]}


def _of_embedding(_: nn.Module, __: Shape, weight: Shape) -> dict[str, Any]:
    return {"num_embeddings": weight[0], "embedding_dim": weight[1]}


def _of_layer_norm(_: nn.Module, __: Shape, weight: Shape) -> dict[str, Any]:
    return {"normalized_shape": tuple(weight)}


def _of_group_norm(before: Any, was: Shape, weight: Shape) -> dict[str, Any]:
    """Groups go whole."""
    return {"num_channels": weight[0], "num_groups": before.num_groups * weight[0] // was[0]}


def _of_transposed(_: nn.Module, __: Shape, weight: Shape) -> dict[str, Any]:
    return {"nx": weight[0], "nf": weight[1]}


def _of_convolution(before: Any, was: Shape, weight: Shape) -> dict[str, Any]:
    """Groups go whole, so that the first dimension of the weight says how many are left."""
    whole, part, *_ = weight
    groups = before.groups * whole // was[0] if before.groups > 1 else 1
    is_transposed = isinstance(before, _ConvTransposeNd)
    ins, outs = (whole, part * groups) if is_transposed else (part * groups, whole)
    return {"in_channels": ins, "out_channels": outs, "groups": groups}


_OF_WEIGHT: Mapping[str, Callable[[Any, Shape, Shape], dict[str, Any]]] = {
    "convolution": _of_convolution,
    "linear": _of_linear,
    "embedding": _of_embedding,
    "layer_norm": _of_layer_norm,
    "group_norm": _of_group_norm,
    "transposed": _of_transposed,
}
"""For kinds of layers, the attributes that follow from the weight before and after."""


def _kind(layer: nn.Module) -> str:
    kinds = (
        ("convolution", isinstance(layer, _ConvNd)),
        ("linear", isinstance(layer, nn.Linear)),
        ("embedding", isinstance(layer, nn.Embedding)),
        ("group_norm", isinstance(layer, nn.GroupNorm)),
        ("layer_norm", "normalized_shape" in vars(layer)),  # torch's, and all made like it
        ("transposed", type(layer).__name__ == "Conv1D"),  # transformers' own linear layer
    )
    return next((name for name, is_it in kinds if is_it), "")


def _own(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _of_heads(model: nn.Module, group: Group, gone: int) -> Noted:
    """What modules note of heads, where a channel of the group is one."""
    layers = {member.name.rpartition(".")[0] for member in group.members}
    if all(member.unit == 1 for member in group.members) or any(
        _has_groups(model.get_submodule(layer)) for layer in layers
    ):
        return {}
    left = group.channels - gone
    noted: Noted = {}
    for path in sorted(layers | {layer.rpartition(".")[0] for layer in layers}):
        module = model.get_submodule(path)
        for name in OF_HEADS & vars(module).keys():
            value = getattr(module, name)
            if type(value) is int and value % group.channels == 0:
                noted.setdefault(path, {})[name] = value // group.channels * left
    return noted


def _has_groups(layer: nn.Module) -> bool:
    """Whether what goes whole are groups of a layer, and no heads."""
    is_grouped = isinstance(layer, _ConvNd) and layer.groups > 1
    return is_grouped or isinstance(layer, nn.GroupNorm)
