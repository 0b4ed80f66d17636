"""Several tasks on one trunk, gradients taken one task at a time from one graph and projected."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)


class MultiTask(nn.Module):
    def __init__(self, width=256, depth=5, tasks=3):
        super().__init__()
        layers = [nn.Linear(128, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(width, 16) for _ in range(tasks))

    def forward(self, x):
        shared = self.trunk(x)
        return [head(shared) for head in self.heads]


def gradients_of(model):
    return torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def write_gradients(model, flat):
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p).clone()
        start += p.numel()


model = MultiTask()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(7):
    x = torch.randn(2048, 128)
    targets = [torch.randint(0, 16, (2048,)) for _ in range(3)]
    losses = [F.cross_entropy(out, y) for out, y in zip(model(x), targets)]
    found = []
    for index, loss in enumerate(losses):
        optimizer.zero_grad()
        loss.backward(retain_graph=index < len(losses) - 1)
        found.append(gradients_of(model))
    for one in found:
        for other in found:
            conflict = torch.dot(one, other)
            if conflict < 0:
                one -= conflict / other.norm() ** 2 * other
    write_gradients(model, torch.stack(found).mean(0))
    optimizer.step()
    print(f"step {step} losses {[loss.item() for loss in losses]!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
