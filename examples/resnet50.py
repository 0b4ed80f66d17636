"""ResNet-50, with batch normalisation and SGD with momentum.

Run it with `memfit verify examples/resnet50.py:build --budget 75%`.
"""

import torch
import torchvision
from torch.nn import functional

import memfit


def build(batch: int = 8, resolution: int = 224, layers: int = 50) -> memfit.Workload:
    """ResNet with random weights.

    Args:
        batch: Number of images.
        resolution: Height and width in pixels.
        layers: 18, 34, 50 or 101.
    """
    model = getattr(torchvision.models, f"resnet{layers}")()
    images = torch.randn(batch, 3, resolution, resolution)
    labels = torch.randint(0, 1000, (batch,))
    return memfit.Workload(
        model=model,
        batch={"images": images, "labels": labels},
        loss=lambda model, batch: functional.cross_entropy(model(batch["images"]), batch["labels"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
