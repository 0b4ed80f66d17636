"""A siamese network fed by loader workers, one model called for both images of a pair."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        first, second = torch.randn(2, 1, 56, 56, generator=generator)
        return first, second, float(index % 2)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(2 * 1024, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, first, second):
        both = torch.cat([self.features(first), self.features(second)], 1)
        return self.fc(both).squeeze(1)


def main():
    torch.manual_seed(35)
    loader = torch.utils.data.DataLoader(
        Pairs(100), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True
    )
    model = Siamese()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        for first, second, targets in loader:
            optimizer.zero_grad()
            outputs = model(first, second)
            loss = F.binary_cross_entropy_with_logits(outputs, targets.float())
            loss.backward()
            optimizer.step()
            print(f"Train Epoch: {epoch} batch {len(first)} Loss: {loss.item()!r}")
        scheduler.step()
    weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
    print(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
