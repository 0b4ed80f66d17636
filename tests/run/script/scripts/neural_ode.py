"""A neural ODE solved by Runge-Kutta steps, its gradient by the adjoint equation."""

import hashlib

import torch
import torch.nn as nn


class Dynamics(nn.Module):
    def __init__(self, dimension=64, hidden=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dimension, hidden), nn.Tanh(), nn.Linear(hidden, dimension)
        )

    def forward(self, t, y):
        return self.net(y) * (1 + 0.1 * t)


def rk4(function, t, h, y):
    k1 = function(t, y)
    k2 = function(t + h / 2, y + h * k1 / 2)
    k3 = function(t + h / 2, y + h * k2 / 2)
    k4 = function(t + h, y + h * k3)
    return y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, steps, y, *parameters):
        ctx.function, ctx.steps = function, steps
        states = [y]
        with torch.no_grad():
            for index in range(steps):
                states.append(rk4(function, index / steps, 1 / steps, states[-1]))
        ctx.save_for_backward(*states)
        return states[-1]

    @staticmethod
    def backward(ctx, gradient):
        parameters = tuple(ctx.function.parameters())
        totals = [torch.zeros_like(p) for p in parameters]
        for index in reversed(range(ctx.steps)):
            with torch.enable_grad():
                y = ctx.saved_tensors[index].detach().requires_grad_(True)
                following = rk4(ctx.function, index / ctx.steps, 1 / ctx.steps, y)
                found = torch.autograd.grad(following, (y, *parameters), gradient)
            gradient = found[0]
            totals = [total + one for total, one in zip(totals, found[1:])]
        return None, None, gradient, *totals


class ODENet(nn.Module):
    def __init__(self, adjoint):
        super().__init__()
        self.inside, self.dynamics = nn.Linear(32, 64), Dynamics()
        self.outside, self.adjoint = nn.Linear(64, 4), adjoint

    def forward(self, x, steps=6):
        y = self.inside(x)
        if self.adjoint:
            y = Adjoint.apply(self.dynamics, steps, y, *self.dynamics.parameters())
        else:
            for index in range(steps):
                y = rk4(self.dynamics, index / steps, 1 / steps, y)
        return self.outside(y)


for adjoint in (False, True):
    torch.manual_seed(21)
    model = ODENet(adjoint)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    for iteration in range(5):
        optimizer.zero_grad()
        x, target = torch.randn(1024, 32), torch.randint(0, 4, (1024,))
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        print(f"Iter {iteration:04d} | adjoint {adjoint} | Total Loss {loss.item()!r}")
    print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
