"""Contrastive learning: two views of a batch, one forward, every image against every other."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(40)


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(4 * width, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        return F.normalize(self.projector(self.body(x)), dim=1)


def augment(images):
    flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    return flipped * (0.6 + 0.8 * torch.rand(len(images), 1, 1, 1))


def nt_xent(features, temperature=0.5):
    count = len(features) // 2
    similar = features @ features.t() / temperature
    similar = similar.masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
    partners = torch.cat([torch.arange(count, 2 * count), torch.arange(count)])
    return F.cross_entropy(similar, partners)


model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[3])
for step in range(7):
    images = torch.randn(64, 3, 32, 32)
    loss = nt_xent(model(torch.cat([augment(images), augment(images)])))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step} loss {loss.item()!r}")
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
