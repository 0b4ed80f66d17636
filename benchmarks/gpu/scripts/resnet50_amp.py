"""ResNet-50 on random images: float16 autocast with a GradScaler, a schedule, evaluation."""

import argparse
import hashlib

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randn(2 * args.batch_size, 3, args.image_size, args.image_size)
    data = TensorDataset(images, torch.randint(0, 1000, (len(images),)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, pin_memory=True)
    model = torchvision.models.resnet50().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    done = 0
    while done < args.steps:
        model.train()
        for images, labels in loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            done += 1
            print(f"step {done} loss {loss.item()!r}")
    model.eval()
    with torch.no_grad():
        print(f"evaluated {criterion(model(images), labels).item()!r}")
    weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    print(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
