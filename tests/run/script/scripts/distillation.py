"""Knowledge distillation: a student follows a teacher that runs without gradients."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(38)


def network(width):
    layers, inside = [], 3
    for outside in (width, width, 2 * width, 2 * width):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        inside = outside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10)]
    return nn.Sequential(*layers)


def train(model, loss_of, epochs, name):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = loss_of(images, labels)
            loss.backward()
            optimizer.step()
            print(f"{name} epoch {epoch} loss {loss.item()!r}")


batches = [(torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))) for _ in range(4)]
teacher, student = network(32), network(16)
train(teacher, lambda x, y: F.cross_entropy(teacher(x), y), 1, "teacher")
teacher.eval()
T, alpha = 4.0, 0.7


def distill(images, labels):
    with torch.no_grad():
        wanted = teacher(images)
    said = student(images)
    soft = F.kl_div(F.log_softmax(said / T, 1), F.softmax(wanted / T, 1), reduction="batchmean")
    return alpha * T * T * soft + (1 - alpha) * F.cross_entropy(said, labels)


train(student, distill, 2, "student")
state = [*teacher.state_dict().values(), *student.state_dict().values()]
print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest())
