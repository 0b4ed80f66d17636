"""Skip-gram word vectors with sparse gradients and SparseAdam."""

import argparse
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class SkipGram(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.u = nn.Embedding(vocabulary, width, sparse=True)
        self.v = nn.Embedding(vocabulary, width, sparse=True)
        nn.init.uniform_(self.u.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.v.weight)

    def forward(self, center, context, negative):
        u, v, n = self.u(center), self.v(context), self.v(negative)
        score = F.logsigmoid((u * v).sum(1).clamp(-10, 10))
        against = F.logsigmoid(-torch.bmm(n, u.unsqueeze(2)).squeeze(2).clamp(-10, 10)).sum(1)
        return -(score + against).mean()


parser = argparse.ArgumentParser()
parser.add_argument("--window", type=int, default=5)
parser.add_argument("--negatives", type=int, default=10)
args = parser.parse_args()
torch.manual_seed(30)
vocabulary, batch = 15_000, 4096
model = SkipGram(vocabulary, 100)
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)
corpus = torch.randint(0, vocabulary, (50_000,))
for iteration in range(10):
    places = torch.randint(args.window, len(corpus) - args.window, (batch,))
    offsets = torch.randint(1, args.window + 1, (batch,))
    negative = torch.randint(0, vocabulary, (batch, args.negatives))
    optimizer.zero_grad()
    loss = model(corpus[places], corpus[places + offsets], negative)
    loss.backward()
    optimizer.step()
    print(f"iteration {iteration} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
