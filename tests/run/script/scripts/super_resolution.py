"""Sub-pixel super-resolution, with the sharpness of a test image after each epoch."""

import argparse
import hashlib
from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(64, 32, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(32, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


parser = argparse.ArgumentParser()
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--nEpochs", type=int, default=2)
opt = parser.parse_args()
torch.manual_seed(123)
low = torch.rand(20, 1, 64, 64)
high = torch.rand(20, 1, 64 * opt.upscale_factor, 64 * opt.upscale_factor)
pairs = torch.utils.data.TensorDataset(low, high)
training_data_loader = torch.utils.data.DataLoader(pairs, batch_size=10, shuffle=True)
testing_data_loader = torch.utils.data.DataLoader(pairs, batch_size=5, shuffle=False)
model = Net(upscale_factor=opt.upscale_factor)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for epoch in range(1, opt.nEpochs + 1):
    epoch_loss = 0
    for batch in training_data_loader:
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training_data_loader)!r}")
    avg_psnr = 0
    with torch.no_grad():
        for input, target in testing_data_loader:
            avg_psnr += 10 * log10(1 / criterion(model(input), target).item())
    print(f"===> Avg. PSNR: {avg_psnr / len(testing_data_loader)!r} dB")
    torch.save(model, f"model_epoch_{epoch}.pth")
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
