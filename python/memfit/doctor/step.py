"""The tiny step on which ``memfit doctor`` tries what memfit is for.

Responsible for the workload only: the program captures, plans and runs it as it does any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memfit.workload import Workload

_WIDTH = 64
_LAYERS = 4
_ROWS = 256
_ROWS_ON_GPU = 1 << 16
"""The caching allocator takes 2 MiB at least: of less, nothing can be saved."""


def build(batch: int = 0, device: str = "cpu") -> Workload:
    """A few linear layers, whose activations are most of the peak.

    Args:
        batch: Rows of the input; 0 for as many as the device needs.
        device: Where it runs.
    """
    rows = batch or (_ROWS if device == "cpu" else _ROWS_ON_GPU)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS)]
    return Workload(
        model=nn.Sequential(*layers).to(device),
        batch=torch.randn(rows, _WIDTH, device=device),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()
