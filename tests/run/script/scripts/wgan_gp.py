"""WGAN-GP: five critic steps a generator step, with a penalty on the critic's gradient."""

import hashlib

import torch
from torch import autograd, nn

torch.manual_seed(3)
BATCH, LATENT, LAMBDA, N_CRITIC = 48, 64, 10.0, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(LATENT, 128 * 8 * 8)
        self.net = nn.Sequential(
            nn.ConvTranspose2d(128, 64, 4, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.project(z).view(-1, 128, 8, 8))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 1),
        )

    def forward(self, x):
        return self.net(x)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1, 1, 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(between)
    (gradient,) = autograd.grad(
        score, between, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
    )
    return ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


generator, critic = Generator(), Critic()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
for iteration in range(3):
    for _ in range(N_CRITIC):
        real = torch.randn(BATCH, 3, 32, 32)
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, LATENT))
        optimizer_c.zero_grad()
        penalty = gradient_penalty(critic, real, fake)
        loss_c = critic(fake).mean() - critic(real).mean() + LAMBDA * penalty
        loss_c.backward()
        optimizer_c.step()
        print(f"critic {loss_c.item()!r} penalty {penalty.item()!r}")
    optimizer_g.zero_grad()
    loss_g = -critic(generator(torch.randn(BATCH, LATENT))).mean()
    loss_g.backward()
    optimizer_g.step()
    print(f"iteration {iteration} generator {loss_g.item()!r}")
state = [*generator.state_dict().values(), *critic.state_dict().values()]
print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest())
