"""PyTorch's own activation checkpointing, put round modules as its users do by hand.

Responsible for wrapping blocks for the time of a step, so that the same model also runs plain, and
for the policy of selective checkpointing that keeps what matrix products return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.planners.models import blocks
from benchmarks.planners.way import Way, ordinary_step
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memfit import Workload

Contexts = Callable[[], Any]

_ATEN = torch.ops.aten
# Convolutions are matrix products too; attention is listed under the names it has on CPU and CUDA.
MATMULS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
    }
)


def every_block(name: str, workload: Workload, *, stride: int = 1) -> Way:
    """Checkpoint every ``stride``-th block."""
    chosen = blocks(name, workload.model)[::stride]
    return wrapped(workload, [(module, None) for module in chosen])


def keeping_matmuls(name: str, workload: Workload) -> Way:
    """Checkpoint every block, selectively: what matrix products return is kept."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_matmuls)
    return wrapped(workload, [(module, contexts) for module in blocks(name, workload.model)])


def _keep_matmuls(_context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = func in MATMULS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(workload: Workload, chosen: Iterable[tuple[nn.Module, Contexts | None]]) -> Way:
    """A step whose chosen modules are checkpointed, each with its own policy or none."""
    modules = list(chosen)
    plain = ordinary_step(workload)

    def step() -> Any:
        with _checkpointed(modules):
            return plain()

    return Way(step, notes={"modules": len(modules)})


@contextlib.contextmanager
def _checkpointed(modules: list[tuple[nn.Module, Contexts | None]]) -> Iterator[None]:
    for module, contexts in modules:
        options = {} if contexts is None else {"context_fn": contexts}
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for module, _ in modules:
            del module.forward  # the class's own shows again
