"""Small workloads for the command-line tests, and some that fail on purpose."""

import time

import torch
from torch import nn

import memfit

print("this line is printed on import and must not reach standard output")


def mlp(batch: int = 512, width: int = 64, depth: int = 6, *, bias: bool = True) -> memfit.Workload:
    """A deep, narrow network whose activations dominate."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=bias), nn.GELU()]
    return memfit.Workload(
        model=nn.Sequential(*layers),
        batch=torch.randn(batch, width),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


def images(batch: int = 8) -> memfit.Workload:
    """Inference whose pieces of an odd batch are larger than those of an even one."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return memfit.Workload(nn.Sequential(*layers).eval(), torch.randn(batch, 3, 32, 32))


def tanh_layers(layers: int = 6) -> memfit.Workload:
    """Layers that each save 256 KiB of numbers for backward."""
    torch.manual_seed(0)
    stack = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(layers)]
    return memfit.Workload(
        nn.Sequential(*stack),
        torch.randn(512, 128),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


def transformer(batch: int = 4, sequence: int = 64, width: int = 64) -> memfit.Workload:
    """A tiny transformer."""
    return memfit.Workload(
        model=nn.Sequential(*[Block(width) for _ in range(3)]),
        batch=torch.randn(batch, sequence, width),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


def inference() -> memfit.Workload:
    """A forward pass without a loss."""
    return memfit.Workload(model=nn.Linear(64, 64), batch=torch.randn(8, 64))


def wrong_type():
    """Not a workload."""
    return nn.Linear(2, 2)


def needs_value(rows: int):
    """A parameter without default."""
    return mlp(batch=rows)


def fails_in_build():
    """Fails by itself."""
    raise RuntimeError("no data today")


def fails_in_forward():
    """Fails by itself, in its forward."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch) @ torch.ones(3, 3)

    return memfit.Workload(model=nn.Linear(8, 8), batch=torch.randn(4, 8), loss=loss)


def fails_in_a_layer():
    """Fails in a layer of torch's, whose input has another width."""
    return memfit.Workload(model=nn.Sequential(nn.Linear(8, 8)), batch=torch.randn(4, 9))


def slow():
    """Takes long to build, so that it can be interrupted."""
    print("building slowly", flush=True)
    time.sleep(60)
    return mlp()


NOT_A_FUNCTION = 3
