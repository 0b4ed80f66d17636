"""Exceptions that end a script show the frames that ``python`` shows, whatever ran in between."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ran import inline

SCRIPT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    where, at = WHERE

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fails):
            ctx.fails = fails
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return {}[ctx.fails] if ctx.fails else (gradient, None)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))
            self.body = nn.Sequential(*layers)

        def forward(self, x, step):
            x = self.body(x)
            if where == "op" and step == at:
                x @ torch.ones(3, 3)
            return Fails.apply(x, where == "backward" and step == at)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        loss = model(torch.randn(2048, 64), step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if where == "again" and step == at:
            loss.backward()
        optimizer.step()
        if where == "evaluation" and step == at:
            with torch.no_grad():
                model(torch.randn(8, 3), 0)
"""

FRAME = re.compile(r'File "(.+)", line \d+, in (.+)')
OF_HOOKS = ("_call_impl", "inner")
"""How modules call what they are is another line where they have hooks."""


def frames(stderr: str) -> list[tuple[str, str]]:
    found = FRAME.findall(stderr[stderr.index("Traceback") :])
    return [(file, name) for file, name in found if name not in OF_HOOKS]


@pytest.mark.parametrize(
    "where",
    [
        *(("op", 0), ("op", 5), ("backward", 0), ("backward", 5)),
        *(("again", 0), ("again", 5), ("evaluation", 5)),
    ],
    ids=str,
)
def test_exceptions_show_what_python_shows(tmp_path: Path, where: tuple[str, int]):
    ran = inline(tmp_path, "7MiB", SCRIPT.replace("WHERE", repr(where)), offload=str(tmp_path))
    assert ran.code == 1
    found = frames(ran.stderr)
    assert found
    assert not [file for file, _ in found if "/memfit/" in file or file.endswith("torch/_ops.py")]
