"""Meta-learning: inner steps by autograd with a graph of their own, one outer step for all tasks."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(37)
learner = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 7 * 7, 5),
)
meta_optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
for iteration in range(5):
    meta_optimizer.zero_grad()
    meta_loss = 0.0
    for _ in range(2):
        support, query = torch.randn(2, 35, 1, 28, 28)
        labels = torch.arange(5).repeat(7)
        weights = dict(learner.named_parameters())
        for _ in range(3):
            inner = F.cross_entropy(functional_call(learner, weights, support), labels)
            slopes = torch.autograd.grad(inner, weights.values(), create_graph=True)
            weights = {
                name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes)
            }
        meta_loss = meta_loss + F.cross_entropy(functional_call(learner, weights, query), labels)
    meta_loss.backward()
    meta_optimizer.step()
    print(f"iteration {iteration} meta loss {meta_loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in learner.parameters())).hexdigest())
