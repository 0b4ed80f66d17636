"""A variational autoencoder on random digits, with a reconstruction saved after each epoch."""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from torch import nn, optim


class VAE(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc21 = nn.Linear(hidden, 20)
        self.fc22 = nn.Linear(hidden, 20)
        self.fc3 = nn.Linear(20, hidden)
        self.fc4 = nn.Linear(hidden, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=2048)
args = parser.parse_args()
torch.manual_seed(4)
images = torch.rand(8192, 1, 28, 28)
loader = torch.utils.data.DataLoader(images, batch_size=args.batch_size, shuffle=True)
model = VAE(400)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1, args.epochs + 1):
    model.train()
    train_loss = 0
    for data in loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(images)!r}")
    with torch.no_grad():
        torch.save(model.decode(torch.randn(64, 20)).view(64, 1, 28, 28), f"sample_{epoch}.pt")
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
