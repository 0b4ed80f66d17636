"""A vision transformer of timm under bfloat16 autocast, with an average of its weights."""

import argparse
import copy
import hashlib

import timm
import torch
import torch.nn.functional as F


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model(args.model, drop_path_rate=0.1).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    model.train()
    for step in range(args.steps):
        images = torch.randn(args.batch_size, 3, 224, 224).to(device)
        labels = torch.randint(0, 1000, (args.batch_size,)).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, value in zip(average.parameters(), model.parameters()):
                kept.lerp_(value, 0.01)
        print(f"step {step} loss {loss.item()!r}")
    weights = b"".join(value.cpu().numpy().tobytes() for value in average.state_dict().values())
    print(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
