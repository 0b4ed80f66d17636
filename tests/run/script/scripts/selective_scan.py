"""A state space model with a sequential scan: thousands of small ops a step."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelectiveScan(nn.Module):
    def __init__(self, width=64, state=8):
        super().__init__()
        self.inside = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.select = nn.Linear(width, 2 * state + 1)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(width, 1))
        self.outside = nn.Linear(width, width)

    def forward(self, x):
        length = x.shape[1]
        x, gate = self.inside(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
        b, c, delta = self.select(x).split([8, 8, 1], -1)
        delta = F.softplus(delta)
        decay = torch.exp(delta.unsqueeze(-1) * -self.log_a.exp())
        fed = (delta * x).unsqueeze(-1) * b.unsqueeze(2)
        h, out = torch.zeros_like(fed[:, 0]), []
        for t in range(length):
            h = decay[:, t] * h + fed[:, t]
            out.append((h * c[:, t, None]).sum(-1))
        return self.outside(torch.stack(out, 1) * F.silu(gate))


class Model(nn.Module):
    def __init__(self, vocabulary=300, width=64, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(SelectiveScan(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


torch.manual_seed(43)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(6):
    ids = torch.randint(0, 300, (32, 65))
    loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
