"""The structure of pytorch/examples `dcgan/main.py`: two models trained in turn."""

import torch
import torch.nn as nn

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
netD = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(128, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step in range(6):
    netD.zero_grad()
    real = torch.randn(512, 64)
    label = torch.full((512, 1), 1.0)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    fake = netG(torch.randn(512, 16))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    print(step, repr(errD_real.item()), repr(errD_fake.item()), repr(errG.item()))
print(sum(p.double().sum().item() for p in [*netG.parameters(), *netD.parameters()]))
