"""A contrastive loss, which compares every item of the batch with every other: not to be cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit


class TwoTowers(nn.Module):
    """Two encoders whose outputs should agree item by item."""

    def __init__(self, width: int) -> None:
        """Two small towers of the same width."""
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2)
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Similarities, `[batch, batch]`."""
        return self.left(left) @ self.right(right).t()


def build(batch: int = 16, width: int = 256) -> memfit.Workload:
    """The towers with random weights and the symmetric loss of CLIP."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        similarity = model(batch["left"], batch["right"])
        items = torch.arange(similarity.shape[0])
        ways = (
            functional.cross_entropy(similarity, items),
            functional.cross_entropy(similarity.t(), items),
        )
        return (ways[0] + ways[1]) / 2

    return memfit.Workload(
        model=TwoTowers(width),
        batch={"left": torch.randn(batch, width), "right": torch.randn(batch, width)},
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
