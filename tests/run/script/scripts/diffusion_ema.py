"""Denoising diffusion with a running average of the weights and group norm."""

import copy
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 200


def time_embedding(t, width):
    half = width // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class ResBlock(nn.Module):
    def __init__(self, inside, outside, width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(width, outside)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, 128))
        self.inside = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle = ResBlock(width, width, 128), ResBlock(width, 2 * width, 128)
        self.up = ResBlock(3 * width, width, 128)
        self.outside = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        t = self.mlp(time_embedding(t, self.width))
        h1 = self.down(self.inside(x), t)
        h2 = self.middle(F.avg_pool2d(h1, 2), t)
        h = torch.cat([h1, F.interpolate(h2, scale_factor=2)], 1)
        return self.outside(self.up(h, t))


@torch.no_grad()
def update_ema(ema, model, decay=0.99):
    for averaged, parameter in zip(ema.parameters(), model.parameters()):
        averaged.mul_(decay).add_(parameter, alpha=1 - decay)


torch.manual_seed(26)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), 0)
model = Denoiser()
ema = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
for step in range(7):
    images, noise = torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32)
    t = torch.randint(0, STEPS, (16,))
    a = alphas[t][:, None, None, None]
    loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    update_ema(ema, model)
    print(f"step {step} loss {loss.item()!r}")
with torch.no_grad():
    print(f"sample {ema(torch.randn(4, 3, 32, 32), torch.full((4,), 10)).sum().item()!r}")
print(hashlib.sha256(b"".join(p.numpy() for p in ema.parameters())).hexdigest())
