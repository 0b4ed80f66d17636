"""Style transfer: the image is what is trained, through a frozen network that inserts its losses."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(28)


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


class StyleLoss(nn.Module):
    def __init__(self, feature):
        super().__init__()
        self.target = gram_matrix(feature).detach()

    def forward(self, input):
        self.loss = F.mse_loss(gram_matrix(input), self.target)
        return input


def build(content, style):
    layers, widths = [], (3, 32, 32, 64, 64)
    for inside, outside in zip(widths, widths[1:]):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=False)]
    model, contents, styles = nn.Sequential(), [], []
    for index, layer in enumerate(layers):
        model.append(layer)
        if isinstance(layer, nn.Conv2d):
            styles.append(StyleLoss(model(style)))
            model.append(styles[-1])
        if index == 4:
            contents.append(ContentLoss(model(content)))
            model.append(contents[-1])
    return model.eval().requires_grad_(False), contents, styles


content, style = torch.rand(1, 3, 160, 160), torch.rand(1, 3, 160, 160)
model, contents, styles = build(content, style)
image = content.clone().requires_grad_(True)
optimizer = torch.optim.Adam([image], lr=0.02)
for step in range(8):
    with torch.no_grad():
        image.clamp_(0, 1)
    optimizer.zero_grad()
    model(image)
    style_score = sum(one.loss for one in styles) * 1e4
    content_score = sum(one.loss for one in contents)
    loss = style_score + content_score
    loss.backward()
    optimizer.step()
    print(f"run {step} style {style_score.item()!r} content {content_score.item()!r}")
print(hashlib.sha256(image.detach().numpy().tobytes()).hexdigest())
