"""A vision transformer with dropout.

Run it with `memfit verify examples/vit.py:build --budget 50%`.
"""

import timm
import torch
from torch.nn import functional

import memfit


def build(
    batch: int = 8,
    name: str = "vit_small_patch16_224",
    depth: int = 12,
    dropout: float = 0.1,
) -> memfit.Workload:
    """Vision transformer with random weights.

    Args:
        batch: Number of images.
        name: Any vision transformer of timm.
        depth: Number of transformer blocks.
        dropout: Probability in the head and after every projection.
    """
    model = timm.create_model(name, drop_rate=dropout, proj_drop_rate=dropout, depth=depth)
    images = torch.randn(batch, 3, 224, 224)
    labels = torch.randint(0, 1000, (batch,))
    return memfit.Workload(
        model=model,
        batch={"images": images, "labels": labels},
        loss=lambda model, batch: functional.cross_entropy(model(batch["images"]), batch["labels"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
