"""A single-stage detector with a pyramid, multi-scale batches and boxes that differ in number."""

import hashlib
import random

import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outside),
        nn.SiLU(inplace=True),
    )


class Detector(nn.Module):
    def __init__(self, classes=5, width=24):
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 2), conv(width, width))
        self.stage1 = nn.Sequential(conv(width, 2 * width, 2), conv(2 * width, 2 * width))
        self.stage2 = nn.Sequential(conv(2 * width, 4 * width, 2), conv(4 * width, 4 * width))
        self.lateral = nn.Conv2d(4 * width, 2 * width, 1)
        self.head = nn.Sequential(conv(2 * width, 2 * width), nn.Conv2d(2 * width, 5 + classes, 1))

    def forward(self, x):
        c1 = self.stage1(self.stem(x))
        c2 = self.lateral(self.stage2(c1))
        p1 = c1 + F.interpolate(c2, size=c1.shape[-2:], mode="nearest")
        return [self.head(p1), self.head(c2)]


def compute_loss(outputs, targets, images):
    loss = images.new_zeros(())
    for output in outputs:
        height, width = output.shape[-2:]
        confidence = torch.zeros(len(images), height, width)
        for index, boxes in enumerate(targets):
            columns = (boxes[:, 0] * width).long().clamp(max=width - 1)
            rows = (boxes[:, 1] * height).long().clamp(max=height - 1)
            confidence[index, rows, columns] = 1.0
            picked = output[index, :, rows, columns].t()
            loss = loss + F.smooth_l1_loss(picked[:, :4].sigmoid(), boxes[:, :4])
            loss = loss + F.cross_entropy(picked[:, 5:], boxes[:, 4].long())
        loss = loss + F.binary_cross_entropy_with_logits(output[:, 4], confidence)
    return loss / len(images)


torch.manual_seed(6)
random.seed(6)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
for step in range(9):
    size = random.choice([128, 160, 192])
    images = torch.randn(6, 3, size, size)
    targets = []
    for _ in range(len(images)):
        count = random.randint(1, 6)
        targets.append(torch.cat([torch.rand(count, 4), torch.randint(0, 5, (count, 1))], 1))
    loss = compute_loss(model(images), targets, images)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    print(f"step {step} size {size} loss {loss.item()!r}")
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
