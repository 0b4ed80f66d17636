"""Models pruned by torch-pruning's DepGraph, where it is installed (`pip install torch-pruning`).

Responsible for giving it what it has to be told of each model, by its manual: what it ignores, how
many heads a projection has, and what its modules note of sizes afterwards. Scores are the ones that
memfit takes: the squares of all that goes with a channel, biases too. Each group gives up the same
share.

What it cannot trace is replaced, for it alone, by what depends on the same channels: transformers'
`Conv1D` by `nn.Linear` with the same numbers; and while it looks, a packed projection that is
`split` by three, and the rotation of queries and keys by none.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

FINEST = 1 / 4096
"""Shares are told apart so far."""


def is_installed() -> bool:
    """Whether torch-pruning can be imported."""
    return importlib.util.find_spec("torch_pruning") is not None


def count(model: nn.Module) -> int:
    """How many parameters a model has, each once."""
    return sum(parameter.numel() for parameter in model.parameters())


def pruned_to(model: nn.Module, batch: Any, most: int) -> nn.Module:
    """A copy with no more parameters than that: the least pruning that is enough."""
    low, high, best = 0.0, 1.0, None
    while high - low > FINEST:
        share = (low + high) / 2
        smaller = pruned_by(model, batch, share)
        if count(smaller) <= most:
            best, high = smaller, share
        else:
            low = share
    assert best is not None
    return best


def pruned_by(model: nn.Module, batch: Any, share: float) -> nn.Module:
    """A copy without a share of the channels and heads of each group.

    Args:
        model: The model; it stays as it is.
        batch: Images, or a dictionary that has `images` or `input_ids`.
        share: Which part goes.
    """
    import torch_pruning

    scores = {"p": 2, "group_reduction": "sum", "normalizer": None, "bias": True}
    smaller = copy.deepcopy(model)
    training = smaller.training
    _without_conv1d(smaller)
    if hasattr(smaller, "config"):
        smaller.config.use_cache = False
    heads = dict(_heads(smaller.eval()))
    last = [layer for layer in smaller.modules() if isinstance(layer, nn.Linear)][-1]
    with _traceable(), warnings.catch_warnings(action="ignore"):
        torch_pruning.pruner.MagnitudePruner(
            smaller,
            _inputs(batch),
            importance=torch_pruning.importance.MagnitudeImportance(**scores),
            pruning_ratio=share,
            ignored_layers=[last],
            num_heads=heads,
            prune_num_heads=bool(heads),
            prune_head_dims=False,
            head_pruning_ratio=share,
            output_transform=lambda output: getattr(output, "logits", output),
        ).step()
    _mend(smaller, model, heads)
    return smaller.train(training)


def _inputs(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return batch["images"][:1] if "images" in batch else batch["input_ids"][:1, :32]
    tensor: Tensor = batch if isinstance(batch, Tensor) else batch[0]
    return tensor[:1]


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Projections that compute heads, and how many."""
    for module in model.modules():
        if hasattr(module, "qkv"):
            yield module.qkv, module.num_heads
        elif hasattr(module, "c_attn"):
            yield from ((part, module.num_heads) for part in module.c_attn.parts)
        elif hasattr(module, "q_proj"):
            yield module.q_proj, module.config.num_attention_heads
            yield module.k_proj, module.config.num_key_value_heads
            yield module.v_proj, module.config.num_key_value_heads


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0])
    made.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    made.bias = nn.Parameter(bias.detach().clone())
    return made


def _without_conv1d(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                setattr(module, name, _linear(child.weight.t(), child.bias))
        if hasattr(module, "c_attn"):
            module.c_attn = _Apart(module.c_attn)


class _Apart(nn.Module):
    """A packed projection as three.

    Attributes:
        parts: The projections.
    """

    def __init__(self, packed: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            _linear(weight, bias)
            for weight, bias in zip(packed.weight.chunk(3), packed.bias.chunk(3), strict=True)
        )

    def forward(self, inputs: Tensor) -> _Split:
        """The three results, which a model that splits a packed one gets as they are."""
        return _Split(part(inputs) for part in self.parts)

    def packed(self) -> nn.Linear:
        """The three as one again."""
        weights, biases = zip(*((it.weight, it.bias) for it in self.parts), strict=True)
        return _linear(torch.cat(weights), torch.cat(biases))


class _Split(tuple[Tensor, ...]):
    __slots__ = ()

    def split(self, *_: Any, **__: Any) -> _Split:
        return self


@contextlib.contextmanager
def _traceable() -> Iterator[None]:
    """Queries and keys that are not rotated: on that its search does not end."""
    try:
        from transformers.models.llama import modeling_llama
    except ImportError:
        yield
        return

    def straight(queries: Tensor, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return queries, keys

    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", straight):
        yield


def _mend(smaller: nn.Module, model: nn.Module, heads: dict[nn.Module, int]) -> None:
    """What modules note of their sizes, and weights that were one."""
    for module in smaller.modules():
        if hasattr(module, "qkv"):
            module.num_heads = heads[module.qkv]
            module.attn_dim = module.qkv.out_features // 3
        elif hasattr(module, "c_attn"):
            module.num_heads = heads[module.c_attn.parts[0]]
            module.c_attn = module.c_attn.packed()
            module.embed_dim = module.split_size = module.c_attn.out_features // 3
        elif hasattr(module, "q_proj"):
            module.num_key_value_groups = module.q_proj.out_features // module.k_proj.out_features
    if hasattr(model, "lm_head") and model.lm_head.weight is model.get_input_embeddings().weight:
        embedding = smaller.get_input_embeddings()
        assert torch.equal(smaller.lm_head.weight, embedding.weight)
        smaller.lm_head.weight = embedding.weight
