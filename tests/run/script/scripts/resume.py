"""Training that is interrupted, and goes on from a file with model, optimizer and schedule."""

import argparse
import hashlib
import os

import torch
import torch.nn as nn


def build():
    torch.manual_seed(32)
    model = nn.Sequential(nn.Embedding(6000, 256), nn.Linear(256, 512), nn.GELU())
    model.append(nn.Linear(512, 6000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def save(path, step, model, optimizer, scheduler):
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def resume(path, model, optimizer, scheduler):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    print(f"resumed from step {state['step']}")
    return state["step"] + 1


def train(steps, path):
    model, optimizer, scheduler = build()
    first = resume(path, model, optimizer, scheduler) if os.path.exists(path) else 0
    for step in range(first, steps):
        ids = torch.randint(0, 6000, (4, 65))
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item()!r}")
    save(path, steps - 1, model, optimizer, scheduler)
    return model


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--checkpoint", default="checkpoint.pt")
args = parser.parse_args()
train(args.steps // 2, args.checkpoint)
model = train(args.steps, args.checkpoint)
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
