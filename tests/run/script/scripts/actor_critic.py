"""Advantage actor-critic over several environments at once, eight moves an update."""

import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal


class ActorCritic(nn.Module):
    def __init__(self, observations, actions, hidden=512):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(observations, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.mean = nn.Linear(hidden, actions)
        self.log_std = nn.Parameter(torch.zeros(actions))
        self.value = nn.Linear(hidden, 1)

    def forward(self, observation):
        hidden = self.body(observation)
        return Normal(self.mean(hidden), self.log_std.exp()), self.value(hidden).squeeze(-1)


class Pendulums:
    """Many point masses that are to stay near the origin."""

    def __init__(self, count):
        self.state = torch.randn(count, 16)

    def step(self, action):
        self.state = 0.95 * self.state + 0.1 * action.repeat(1, 4) + 0.01 * torch.randn(16)
        return self.state, -self.state.square().mean(1)


torch.manual_seed(9)
envs = Pendulums(1024)
agent = ActorCritic(16, 4)
optimizer = torch.optim.RMSprop(agent.parameters(), lr=7e-4, eps=1e-5)
observation = envs.state
for update in range(6):
    log_probs, values, rewards, entropy = [], [], [], 0
    for _ in range(6):
        distribution, value = agent(observation)
        action = distribution.sample()
        observation, reward = envs.step(action)
        log_probs.append(distribution.log_prob(action).sum(-1))
        values.append(value)
        rewards.append(reward)
        entropy = entropy + distribution.entropy().sum(-1).mean()
    with torch.no_grad():
        _, following = agent(observation)
    returns = []
    for reward in reversed(rewards):
        following = reward + 0.99 * following
        returns.insert(0, following)
    advantage = torch.stack(returns) - torch.stack(values)
    policy_loss = -(torch.stack(log_probs) * advantage.detach()).mean()
    loss = policy_loss + 0.5 * advantage.pow(2).mean() - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    print(f"update {update} loss {loss.item()!r} reward {torch.stack(rewards).mean().item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in agent.parameters())).hexdigest())
