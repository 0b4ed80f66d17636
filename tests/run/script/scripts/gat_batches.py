"""Graph attention over batches of small graphs: every batch has other numbers of nodes and edges."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


def scatter_softmax(scores, index, count):
    top = torch.full((count, scores.size(1)), -1e9)
    top = top.scatter_reduce(0, index.unsqueeze(1).expand_as(scores), scores, "amax")
    scores = (scores - top[index].detach()).exp()
    total = torch.zeros(count, scores.size(1)).index_add_(0, index, scores)
    return scores / (total[index] + 1e-16)


class Attention(nn.Module):
    def __init__(self, inside, outside, heads):
        super().__init__()
        self.heads, self.size = heads, outside
        self.lin = nn.Linear(inside, heads * outside, bias=False)
        self.att = nn.Parameter(torch.randn(2, heads, outside) * 0.1)

    def forward(self, x, edges):
        source, target = edges
        h = self.lin(x).view(-1, self.heads, self.size)
        scores = (h * self.att[0]).sum(-1)[source] + (h * self.att[1]).sum(-1)[target]
        alpha = scatter_softmax(F.leaky_relu(scores, 0.2), target, len(x))
        out = torch.zeros_like(h).index_add(0, target, h[source] * alpha.unsqueeze(-1))
        return F.elu(out.flatten(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = Attention(32, 16, 4), Attention(64, 16, 4)
        self.readout = nn.Linear(64, 2)

    def forward(self, x, edges, batch, graphs):
        x = self.conv2(self.conv1(x, edges), edges)
        pooled = torch.zeros(graphs, x.size(1)).index_add(0, batch, x)
        return self.readout(pooled / torch.bincount(batch, minlength=graphs).unsqueeze(1))


def collate(graphs):
    xs, edges, batch, start = [], [], [], 0
    for index, (x, edge) in enumerate(graphs):
        xs.append(x)
        edges.append(edge + start)
        batch.append(torch.full((len(x),), index))
        start += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch)


torch.manual_seed(12)
sizes = torch.randint(20, 120, (128,)).tolist()
data = [(torch.randn(n, 32), torch.randint(0, n, (2, 12 * n))) for n in sizes]
labels = torch.randint(0, 2, (128,))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    order = torch.randperm(len(data))
    for picked in order.split(32):
        x, edges, batch = collate([data[i] for i in picked])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges, batch, len(picked)), labels[picked])
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} nodes {len(x)} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
