"""Deep Q-learning: a replay memory, a target network that follows softly, values clipped."""

import hashlib
import math
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, actions):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        self.fc1 = nn.Linear(64 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, actions)

    def forward(self, x):
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


BATCH_SIZE, GAMMA, TAU = 48, 0.99, 0.005
torch.manual_seed(10)
random.seed(10)
policy_net, target_net = DQN(6), DQN(6)
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
memory = ReplayMemory(256)
state = torch.randn(1, 4, 84, 84)
for step in range(64):
    if random.random() > 0.05 + 0.9 * math.exp(-step / 20):
        with torch.no_grad():
            action = policy_net(state).max(1).indices.view(1, 1)
    else:
        action = torch.tensor([[random.randrange(6)]])
    next_state = None if random.random() < 0.1 else torch.randn(1, 4, 84, 84)
    memory.push(state, action, next_state, torch.randn(1))
    state = torch.randn(1, 4, 84, 84) if next_state is None else next_state
    if len(memory) < BATCH_SIZE or step % 2:
        continue
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    mask = torch.tensor([s is not None for s in batch.next_state])
    values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    following = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        seen = torch.cat([s for s in batch.next_state if s is not None])
        following[mask] = target_net(seen).max(1).values
    expected = following * GAMMA + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    target, policy = target_net.state_dict(), policy_net.state_dict()
    for key in policy:
        target[key] = policy[key] * TAU + target[key] * (1 - TAU)
    target_net.load_state_dict(target)
    print(f"step {step} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in target_net.parameters())).hexdigest())
