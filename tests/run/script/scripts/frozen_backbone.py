"""Transfer learning: a frozen ResNet in evaluation mode, a trained head, the best weights kept."""

import copy
import hashlib

import torch
import torch.nn as nn
import torchvision

torch.manual_seed(33)
model = torchvision.models.resnet18(weights=None)
for parameter in model.parameters():
    parameter.requires_grad = False
model.layer4[1].conv2.weight.requires_grad = True
model.fc = nn.Linear(model.fc.in_features, 2)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
criterion = nn.CrossEntropyLoss()
images, labels = torch.randn(48, 3, 96, 96), torch.randint(0, 2, (48,))
parts = {"train": range(0, 32), "val": range(32, 48)}
best_weights, best_loss = copy.deepcopy(model.state_dict()), float("inf")
for epoch in range(2):
    for phase in ["train", "val"]:
        model.train(phase == "train")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        running = 0.0
        for start in range(parts[phase].start, parts[phase].stop, 8):
            inputs, targets = images[start : start + 8], labels[start : start + 8]
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                loss = criterion(model(inputs), targets)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running += loss.item() * len(inputs)
        if phase == "train":
            scheduler.step()
        print(f"{phase} Loss: {running / len(parts[phase])!r}")
        if phase == "val" and running < best_loss:
            best_loss, best_weights = running, copy.deepcopy(model.state_dict())
model.load_state_dict(best_weights)
weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(weights).hexdigest())
