"""The models of the head-to-head: examples of this repository, and the blocks peers checkpoint.

Responsible for building a workload at full or quick size, with or without dropout, and for naming
its blocks. Every method gets the same workload: the same parameters, batch, loss and optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from benchmarks.record import ROOT
from torch import nn
from torch.optim import Optimizer

from memfit import Workload
from memfit.program.target import workload_factory

SEED = 1234


@dataclass(frozen=True)
class Model:
    """One model of the comparison.

    Attributes:
        name: The example's name.
        blocks: Classes of the modules that users put activation checkpointing round.
        quick: Settings of a version that a step takes milliseconds for.
    """

    name: str
    blocks: tuple[str, ...]
    quick: dict[str, str]


MODELS = {
    model.name: model
    for model in (
        Model(
            "gpt2",
            ("GPT2Block",),
            {"layers": "3", "width": "128", "sequence": "64", "batch": "2"},
        ),
        Model(
            "llama",
            ("LlamaDecoderLayer",),
            {"layers": "3", "width": "128", "sequence": "64", "batch": "2"},
        ),
        Model("vit", ("Block",), {"name": "vit_tiny_patch16_224", "depth": "3", "batch": "2"}),
        Model("resnet50", ("Bottleneck", "BasicBlock"), {"layers": "18", "resolution": "64"}),
        Model(
            "unet",
            ("ResnetBlock2D", "Attention"),
            {"resolution": "32", "width": "32", "batch": "2"},
        ),
    )
}


def build(name: str, *, quick: bool, dropout: bool = True) -> Workload:
    """The workload of one model, with random weights that are the same in every process.

    Args:
        name: A key of :data:`MODELS`.
        quick: Whether to build the small version.
        dropout: Whether dropout stays as the example has it.

    Returns:
        The workload.
    """
    settings = MODELS[name].quick if quick else {}
    torch.manual_seed(SEED)
    target = f"{ROOT}/examples/{name}.py:build"
    workload = workload_factory(target, list(settings.items()))()
    config = getattr(workload.model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        # What one sets for training: a cache of keys and values would grow again in recomputation.
        config.use_cache = False
    if not dropout:
        _without_dropout(workload.model)
    return workload


def make_optimizer(workload: Workload) -> Optimizer:
    """Have a workload's optimizer exist, as the methods expect it.

    Args:
        workload: From :func:`build`; gets the optimizer that is returned.

    Returns:
        The optimizer; it has run no step.
    """
    factory = workload.optimizer
    assert factory is not None
    assert not isinstance(factory, Optimizer)
    workload.optimizer = optimizer = factory(workload.model.parameters())
    return optimizer


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def blocks(name: str, model: nn.Module) -> list[nn.Module]:
    """The model's blocks, in the order in which it registers them."""
    return [m for m in model.modules() if type(m).__name__ in MODELS[name].blocks]
