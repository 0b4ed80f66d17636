"""Pairs of encoder layers under activation checkpointing, the form that torch recommends."""

import hashlib

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    def __init__(self, width=128, depth=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)

    def run_pair(self, x, first):
        return self.layers[first + 1](self.layers[first](x))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for first in range(0, len(self.layers), 2):
            if self.training:
                x = checkpoint(self.run_pair, x, first, use_reentrant=False)
            else:
                x = self.run_pair(x, first)
        return self.head(self.norm(x).mean(1))


torch.manual_seed(23)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for iteration in range(7):
    images, labels = torch.randn(24, 3, 64, 64), torch.randint(0, 20, (24,))
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iter {iteration}: loss {loss.item()!r}")
model.eval()
with torch.no_grad():
    print(f"evaluation {model(images).sum().item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
