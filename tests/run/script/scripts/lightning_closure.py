"""A trainer in the shape of Lightning's: each optimizer calls forward and backward by a closure."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class LightningLikeModule(nn.Module):
    def training_step(self, batch, batch_idx):
        raise NotImplementedError

    def configure_optimizers(self):
        raise NotImplementedError


class AutoEncoder(LightningLikeModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 3, 2, 1, output_padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GELU(),
            nn.ConvTranspose2d(32, 3, 3, 2, 1, output_padding=1),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch), batch, reduction="none").sum(dim=[1, 2, 3]).mean()
        print(f"batch {batch_idx} loss {loss.item()!r}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


class Trainer:
    def __init__(self, max_epochs, gradient_clip_val):
        self.max_epochs, self.clip = max_epochs, gradient_clip_val

    def fit(self, module, loader):
        optimizer, scheduler = module.configure_optimizers()
        module.train()
        for _ in range(self.max_epochs):
            for batch_idx, batch in enumerate(loader):

                def closure():
                    loss = module.training_step(batch, batch_idx)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(module.parameters(), self.clip)
                    return loss

                optimizer.step(closure)
            scheduler.step()


torch.manual_seed(19)
model = AutoEncoder()
loader = torch.utils.data.DataLoader(torch.randn(96, 3, 64, 64), batch_size=24, shuffle=True)
Trainer(max_epochs=2, gradient_clip_val=1.0).fit(model, loader)
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
