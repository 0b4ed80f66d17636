"""A transformer whose parameters the loop updates itself, with momentum of its own and no optimizer."""

import hashlib

import torch
import torch.nn as nn

torch.manual_seed(34)
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(500, 128),
    nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
    nn.Linear(128, 500),
)
velocity = [torch.zeros_like(p) for p in model.parameters()]
lr, momentum, weight_decay = 0.05, 0.9, 1e-4
for iteration in range(7):
    ids = torch.randint(0, 500, (16, 96))
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.view(-1, 500), ids.roll(-1, 1).view(-1))
    for p in model.parameters():
        p.grad = None
    loss.backward()
    with torch.no_grad():
        for p, v in zip(model.parameters(), velocity):
            v.mul_(momentum).add_(p.grad + weight_decay * p)
            p -= lr * v
    print(f"iteration {iteration} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
