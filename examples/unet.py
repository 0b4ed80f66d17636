"""The UNet of a diffusion model, learning to predict noise, with dropout.

Run it with `memfit verify examples/unet.py:build --budget 50%`.
"""

import diffusers
import torch
from torch.nn import functional

import memfit


def build(
    batch: int = 4, resolution: int = 64, width: int = 64, layers: int = 2
) -> memfit.Workload:
    """UNet with random weights.

    Args:
        batch: Number of images.
        resolution: Height and width in pixels.
        width: Channels of the first level; the third and fourth have twice as many.
        layers: Residual blocks of a level on the way down; on the way up there is one more.
    """
    model = diffusers.UNet2DModel(
        sample_size=resolution,
        in_channels=3,
        out_channels=3,
        layers_per_block=layers,
        dropout=0.1,
        block_out_channels=(width, width, width * 2, width * 2),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )
    noise = torch.randn(batch, 3, resolution, resolution)
    return memfit.Workload(
        model=model,
        batch={
            "images": torch.randn(batch, 3, resolution, resolution),
            "times": torch.randint(0, 1000, (batch,)),
            "noise": noise,
        },
        loss=lambda model, batch: functional.mse_loss(
            model(batch["images"], batch["times"]).sample, batch["noise"]
        ),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    )
