"""``memfit run --budget`` on scripts that compile something."""

from __future__ import annotations

from pathlib import Path

from ran import inline


def test_only_steps_in_which_something_compiled_runs_are_left_alone(tmp_path: Path):
    ran = inline(
        tmp_path,
        "60%",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 64
    compiled = torch.compile(backend="eager")

    @compiled
    def never(x):
        return x + 1

    @compiled
    def metric(x):
        return (x * 2).relu().sum()

    class Plain(nn.Sequential): pass
    class InPlace(nn.Sequential): pass
    class LossCompiled(nn.Sequential): pass

    def train(kind, loss_of=lambda x: x.square().mean(), prepare=lambda model: None):
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
        model = kind(*layers)
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            loss = loss_of(model(torch.randn(1024, width)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                print(repr(loss.item()), metric(torch.ones(4)).item())

    train(Plain)
    train(LossCompiled, compiled(lambda x: x.square().mean()))
    train(InPlace, prepare=lambda model: model.compile(backend="eager"))
    train(Plain)
    """,
    )
    steps = [(loop["models"], loop["planned"]["steps"]) for loop in ran.loops]
    assert steps == [(["Plain"], 3), (["LossCompiled"], 0), (["InPlace"], 0), (["Plain"], 3)]
    for name in ("LossCompiled", "InPlace"):
        said = f"`{name}` runs unplanned: something that `torch.compile` compiled runs in it"
        assert said in ran.stderr
