"""Small workloads, each with something that makes plans hard.

Responsible for building them, the same from every call. Each model has a switch, ``mode``, by which
a change lets it do more than what was planned. Not responsible for what changes (``changes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from threads import in_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit

ROWS = 64
WIDTH = 24


class Switched(nn.Module):
    """A body, and after it what its switch says."""

    def __init__(self, body: nn.Module, out: int = 8) -> None:
        super().__init__()
        self.body = body
        self.last = nn.Linear(WIDTH, out)
        self.mode = ""

    def forward(self, x: Tensor) -> Tensor:
        body = nn.Sequential(*reversed(self.body)) if self.mode == "reordered" else self.body
        h = in_threads(1, lambda: body(x))[0] if self.mode == "thread" else body(x)
        if self.mode == "branch":
            h = torch.tanh(h) * 2
        if self.mode == "couples":
            h = h - h.mean(0, keepdim=True)
        if self.mode == "raises":
            raise ArithmeticError("a model that fails")
        return self.last(h)


class Residual(nn.Module):
    """Adds in place, and through a rectifier in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.relu(self.up(x), inplace=True))
        h += x
        return F.gelu(h)


class Twice(nn.Module):
    """Uses one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.sin(self.layer(x))).exp().log1p()


class Counting(nn.Module):
    """Keeps a moving mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
        return (h - self.mean).sigmoid()


class Checkpointed(nn.Module):
    """Recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.after = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(checkpoint(self.inner, x, use_reentrant=False))


class Cube(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class OwnFunction(nn.Module):
    """Uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(torch.tanh(self.layer(x))).softmax(-1)


class Experts(nn.Module):
    """Sends rows to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, k, None] * F.gelu(one(x)) for k, one in enumerate(self.experts))


class Attention(nn.Module):
    """Rows as a sequence of four."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(-1, 4, 6)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)).flatten(1)


class Partly(nn.Module):
    """Has a frozen layer, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.layer(torch.tanh(self.frozen(x))))


class Recurrent(nn.Module):
    """Rows as a sequence of four, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.view(-1, 4, 6))[0][:, -1]


class Images(nn.Module):
    """Convolutions and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.pool = nn.Linear(6 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))


def _layers(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 96), nn.GELU(), *extra, nn.LayerNorm(96), nn.Linear(96, WIDTH), nn.Tanh()
    )


def _wide() -> nn.Module:
    """Parameters that take more than a few rows do."""
    return nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, WIDTH))


BODIES: dict[str, Callable[[], nn.Module]] = {
    "layers": _layers,
    "dropout": lambda: _layers(nn.Dropout(0.3)),
    "residual": lambda: nn.Sequential(Residual(), Residual()),
    "twice": Twice,
    "counting": Counting,
    "checkpointed": Checkpointed,
    "own function": OwnFunction,
    "experts": Experts,
    "attention": Attention,
    "partly": Partly,
    "recurrent": Recurrent,
    "images": Images,
}
"""What is between a workload's rows and its last layer."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def batch_of(rows: int = ROWS, seed: int = 0) -> dict[str, Tensor]:
    """Rows and what they should give."""
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=made),
        "y": torch.randint(0, 8, (rows,), generator=made),
    }


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy, and what the model's switch says besides."""
    out = model(batch["x"])
    if model.mode == "summed":
        return F.cross_entropy(out, batch["y"], reduction="sum") / 100  # not to explode
    if model.mode == "penalised":
        loss = F.cross_entropy(out, batch["y"])
        (gradient,) = torch.autograd.grad(loss, model.last.weight, create_graph=True)
        return loss + gradient.square().sum()
    if model.mode == "written":
        squared = out * out  # saves `out`
        out.add_(1)
        return squared.mean()
    if model.mode == "again":
        return F.cross_entropy(out + model(batch["x"].flip(0)), batch["y"])
    return F.cross_entropy(out, batch["y"])


def workload(name: str, *, wide: bool = False, exact: bool = True) -> memfit.Workload:
    """A workload by the name of its body, with the same values each time.

    Args:
        name: Of :data:`BODIES`.
        wide: Whether its parameters take most, rather than its activations.
        exact: Whether its steps are to be the same bit for bit; Adam would make much of rounding.
    """
    torch.manual_seed(11)
    optimizer = adamw if exact and name not in {"twice", "images", "experts"} else momentum
    model = Switched(nn.Sequential(BODIES[name](), _wide() if wide else _layers()))
    batch = batch_of(8 if wide else ROWS)
    clip = 1.0 if name == "recurrent" else None
    return memfit.Workload(model, batch, loss_of, optimizer, clip_grad_norm=clip)
