"""Networks in plain torch, for what no library on every machine has.

Responsible for three: a U-Net for segmentation, the UNet of a diffusion model, a language model
with an LSTM. Not responsible for batches or losses (:mod:`benchmarks.gpu.models`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class TwoConvolutions(nn.Sequential):
    """Two convolutions, each with batch normalisation."""

    def __init__(self, before: int, after: int) -> None:
        """From so many channels to so many."""
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """The U-Net of Ronneberger et al., padded: down, up, and what it had on the way down."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        """Build it.

        Args:
            width: Channels of the first level; each further one has twice as many.
            levels: How many.
            classes: Channels that come out.
        """
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(
            TwoConvolutions(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(TwoConvolutions(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of every pixel."""
        passed = []
        for index, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if index else x)
            passed.append(x)
        passed.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([passed.pop(), grow(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two convolutions with group normalisation, told the time; what came in is added."""

    def __init__(self, before: int, after: int, time: int, dropout: float) -> None:
        """From so many channels to so many."""
        super().__init__()
        self.norm1 = nn.GroupNorm(min(32, before), before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.norm2 = nn.GroupNorm(min(32, after), after)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Images of the same size."""
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        h = self.conv2(self.dropout(functional.silu(self.norm2(h))))
        return self.skip(x) + h  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Attention between the pixels of an image."""

    def __init__(self, width: int, heads: int) -> None:
        """Over so many channels."""
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(min(32, width), width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Images of the same size."""
        batch, width, height, across = x.shape
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            part.view(batch, -1, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(pixels).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.proj(y).transpose(1, 2).view(batch, width, height, across)


class DiffusionUNet(nn.Module):
    """The UNet of Ho et al.: predicts the noise in an image, given the time."""

    def __init__(self, width: int, multiples: tuple[int, ...], dropout: float) -> None:
        """Build it.

        Args:
            width: Channels of the first level.
            multiples: Of it, by level; from the third on with attention.
            dropout: Probability inside each block.
        """
        super().__init__()
        time = 4 * width
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.entry = nn.Conv2d(3, width, 3, padding=1)
        widths = [width * multiple for multiple in multiples]
        self.down, self.down_attention = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        self.up, self.up_attention = nn.ModuleList(), nn.ModuleList()
        for level, (a, b) in enumerate(zip([width, *widths[:-1]], widths, strict=True)):
            attends = level > 1
            self.down.append(ResidualBlock(a, b, time, dropout))
            self.down_attention.append(SelfAttention(b, 4) if attends else nn.Identity())
            self.shrink.append(nn.Conv2d(b, b, 3, stride=2, padding=1))
            self.grow.insert(0, nn.ConvTranspose2d(b, b, 2, stride=2))
            self.up.insert(0, ResidualBlock(2 * b, a, time, dropout))
            self.up_attention.insert(0, SelfAttention(a, 4) if attends else nn.Identity())
        self.middle = ResidualBlock(widths[-1], widths[-1], time, dropout)
        self.norm = nn.GroupNorm(min(32, width), width)
        self.exit = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """The noise."""
        half = self.width // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32)
        angles = times[:, None].float() * torch.exp(-math.log(10_000) / half * steps)
        time = self.embed(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.entry(x)
        passed = []
        for block, attention, shrink in zip(
            self.down, self.down_attention, self.shrink, strict=True
        ):
            x = attention(block(x, time))
            passed.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        for block, attention, grow in zip(self.up, self.up_attention, self.grow, strict=True):
            x = attention(block(torch.cat([passed.pop(), grow(x)], 1), time))
        return self.exit(functional.silu(self.norm(x)))  # type: ignore[no-any-return]


class LanguageLSTM(nn.Module):
    """A language model with an LSTM, dropout between its layers."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        """Build it."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.lstm(self.tokens(ids))[0])  # type: ignore[no-any-return]
