"""A VGG whose fully connected layers hold nearly all parameters, under Adam."""

import hashlib

import torch
from torch import nn

torch.manual_seed(1)


def conv(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True))


model = nn.Sequential(
    conv(3, 16),
    conv(16, 16),
    nn.MaxPool2d(2),
    conv(16, 32),
    conv(32, 32),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 8 * 8, 1024),
    nn.ReLU(True),
    nn.Dropout(),
    nn.Linear(1024, 1024),
    nn.ReLU(True),
    nn.Dropout(),
    nn.Linear(1024, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

for epoch in range(2):
    running_loss = 0.0
    for i in range(5):
        inputs, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"[{epoch + 1}] loss: {running_loss / 5!r}")

print("Finished Training")
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
