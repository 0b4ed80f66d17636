"""Segmentation with a U-Net: batch norm, skips, cross-entropy plus dice, RMSprop, clipping."""

import argparse
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.downs = nn.ModuleList(DoubleConv(width << i, width << i + 1) for i in range(3))
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(width << i + 1, width << i, 2, stride=2) for i in reversed(range(3))
        )
        self.convs = nn.ModuleList(
            DoubleConv(width << i + 1, width << i) for i in reversed(range(3))
        )
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x):
        x = self.inc(x)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, conv in zip(self.ups, self.convs):
            x = conv(torch.cat([skips.pop(), up(x)], dim=1))
        return self.outc(x)


def dice_loss(probabilities, target, epsilon=1e-6):
    inter = 2 * (probabilities * target).sum(dim=(1, 2, 3))
    total = probabilities.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return 1 - ((inter + epsilon) / (total + epsilon)).mean()


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--classes", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(5)
model = UNet(args.classes)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
criterion = nn.CrossEntropyLoss()
data = [
    (torch.randn(3, 96, 96), torch.randint(0, args.classes, (96, 96)))
    for _ in range(4 * args.batch_size)
]
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
for epoch in range(args.epochs):
    model.train()
    for images, masks in loader:
        predicted = model(images)
        loss = criterion(predicted, masks)
        one_hot = F.one_hot(masks, args.classes).permute(0, 3, 1, 2).float()
        loss += dice_loss(F.softmax(predicted, dim=1).float(), one_hot)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"epoch {epoch} loss {loss.item()!r}")
    model.eval()
    with torch.inference_mode():
        images, masks = next(iter(loader))
        score = (model(images).argmax(1) == masks).float().mean()
    scheduler.step(score)
    print(f"epoch {epoch} score {score.item()!r}")
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
