"""A small multilayer perceptron on tabular data, AdamW: parameters and their update are all."""

import hashlib

import torch
import torch.nn as nn

torch.manual_seed(7)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
features, targets = torch.randn(1024, 64), torch.randn(1024, 1)
mean, std = features.mean(0), features.std(0)
features = (features - mean) / std

model = nn.Sequential(
    nn.Linear(64, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
best, patience = float("inf"), 0

for epoch in range(6):
    model.train()
    for start in range(0, 768, 256):
        batch = features[start : start + 256].to(device)
        loss = nn.functional.huber_loss(model(batch), targets[start : start + 256].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        validation = nn.functional.mse_loss(model(features[768:].to(device)), targets[768:])
    print(f"Epoch {epoch}: train {loss.item()!r}, validation {validation.item()!r}")
    if validation < best:
        best, patience = validation.item(), 0
        torch.save(model.state_dict(), "best.pt")
    else:
        patience += 1
    if patience == 3:
        break

model.load_state_dict(torch.load("best.pt"))
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
