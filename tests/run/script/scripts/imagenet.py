"""The structure of pytorch/examples `imagenet/main.py`, on random images."""

import argparse

import torch
import torch.nn as nn
import torchvision.models as models
from torch.optim.lr_scheduler import StepLR


def train(train_loader, model, criterion, optimizer, epoch, device):
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        # Gradients of the step before are there while this one runs forward.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"Epoch: [{epoch}][{i}] Loss {loss.item()!r} Acc@1 {acc1.item()} Acc@5 {acc5.item()}")


def validate(val_loader, model, criterion, device):
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images.to(device))
            print("val", repr(criterion(output, target.to(device)).item()))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True) for k in topk]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = models.__dict__[args.arch](num_classes=10).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(28, 3, 64, 64, generator=generator),
        torch.randint(0, 10, (28,), generator=generator),
    )
    train_loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
    val_loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size)
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device)
        validate(val_loader, model, criterion, device)
        scheduler.step()
        torch.save(
            {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
            "checkpoint.pth.tar",
        )


if __name__ == "__main__":
    main()
