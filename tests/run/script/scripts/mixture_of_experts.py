"""A mixture of experts: a router sends tokens to experts, every expert gets another number."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, width, experts, top=2):
        super().__init__()
        self.gate, self.top = nn.Linear(width, experts, bias=False), top
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        probabilities = self.gate(flat).softmax(-1)
        weights, picked = probabilities.topk(self.top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(picked == index)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        self.balance = (probabilities.mean(0) ** 2).sum() * len(self.experts)
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self, vocabulary=1000, width=96, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.moes = nn.ModuleList(MoE(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for norm, moe in zip(self.norms, self.moes):
            x = x + moe(norm(x))
        return self.head(x), sum(moe.balance for moe in self.moes)


torch.manual_seed(41)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    ids = torch.randint(0, 1000, (16, 65))
    logits, balance = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
