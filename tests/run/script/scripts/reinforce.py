"""REINFORCE on images of a moving target: an episode ends when it ends, one update an episode."""

import hashlib
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


class Chase:
    """A grid with a target; an episode ends when it is reached, or after 40 moves."""

    def __init__(self, side=48):
        self.side = side

    def reset(self):
        self.at, self.target, self.moves = [24, 24], [random.randrange(48), 24], 0
        return self.observation()

    def observation(self):
        image = torch.zeros(1, 2, self.side, self.side)
        image[0, 0, self.at[0], self.at[1]] = 1.0
        image[0, 1, self.target[0], self.target[1]] = 1.0
        return image

    def step(self, action):
        axis, way = divmod(action, 2)
        self.at[axis] = min(max(self.at[axis] + (2 * way - 1), 0), self.side - 1)
        self.moves += 1
        done = self.at == self.target or self.moves >= 40 or random.random() < 0.04
        return self.observation(), 1.0 if self.at == self.target else -0.02, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.affine = nn.Linear(32 * 24 * 24, 64)
        self.dropout = nn.Dropout(p=0.2)
        self.action = nn.Linear(64, 4)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.relu(self.dropout(self.affine(x.flatten(1))))
        return F.softmax(self.action(x), dim=1)


def select_action(policy, state):
    m = Categorical(policy(state))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(policy, optimizer):
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std(unbiased=False) + 1e-6)
    loss = [-log_prob * R for log_prob, R in zip(policy.saved_log_probs, returns)]
    optimizer.zero_grad()
    policy_loss = torch.cat(loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.saved_log_probs[:]
    return policy_loss.item()


torch.manual_seed(8)
random.seed(8)
env, policy = Chase(), Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(10):
    state, done = env.reset(), False
    while not done:
        state, reward, done = env.step(select_action(policy, state))
        policy.rewards.append(reward)
    moves = env.moves
    print(f"Episode {episode} length {moves} loss {finish_episode(policy, optimizer)!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in policy.parameters())).hexdigest())
