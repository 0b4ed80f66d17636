"""A convolutional GAN: two models and two optimizers, trained in turn."""

import argparse
import hashlib

import torch
import torch.nn as nn


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        layers = []
        for inside, outside, stride, padding in (
            (nz, ngf * 4, 1, 0),
            (ngf * 4, ngf * 2, 2, 1),
            (ngf * 2, ngf, 2, 1),
        ):
            layers += [
                nn.ConvTranspose2d(inside, outside, 4, stride, padding, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(True),
            ]
        self.main = nn.Sequential(
            *layers, nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh()
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


parser = argparse.ArgumentParser()
parser.add_argument("--niter", type=int, default=6)
parser.add_argument("--batchSize", type=int, default=96)
opt = parser.parse_args()
torch.manual_seed(2)
netG, netD = Generator(64, 32), Discriminator(32)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(opt.niter):
    netD.zero_grad()
    real = torch.rand(opt.batchSize, 3, 32, 32) * 2 - 1
    label = torch.full((opt.batchSize,), 1.0)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    fake = netG(torch.randn(opt.batchSize, 64, 1, 1))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    print(f"[{i}] Loss_D {(errD_real + errD_fake).item()!r} Loss_G {errG.item()!r}")
state = [*netG.state_dict().values(), *netD.state_dict().values()]
print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest())
