"""ConvNeXt with stochastic depth.

Run it with `memfit verify examples/convnext.py:build --budget 50%`.
"""

import timm
import torch
from torch.nn import functional

import memfit


def build(batch: int = 8, name: str = "convnext_tiny", resolution: int = 224) -> memfit.Workload:
    """ConvNeXt with random weights.

    Args:
        batch: Number of images.
        name: Any ConvNeXt of timm.
        resolution: Height and width in pixels.
    """
    model = timm.create_model(name, drop_path_rate=0.1)
    images = torch.randn(batch, 3, resolution, resolution)
    labels = torch.randint(0, 1000, (batch,))
    return memfit.Workload(
        model=model,
        batch={"images": images, "labels": labels},
        loss=lambda model, batch: functional.cross_entropy(model(batch["images"]), batch["labels"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
