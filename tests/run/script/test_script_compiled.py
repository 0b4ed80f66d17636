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
    assert steps == [(["Plain"], 7), (["LossCompiled"], 0), (["InPlace"], 0)]
    for name in ("LossCompiled", "InPlace"):
        said = f"`{name}` runs unplanned: something that `torch.compile` compiled runs in it"
        assert said in ran.stderr


OPTIMIZER = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    @torch.compile(backend="eager", dynamic=False)
    def updated(p, grad, average, lr):
        average.lerp_(grad, 0.1)
        p.sub_(average.sign() * lr)

    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters, lr=1e-3):
            super().__init__(parameters, {"lr": lr})
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["average"] = torch.zeros_like(p)
                    updated(p.detach(), p.grad, state["average"], group["lr"])

    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = Signs(model.parameters())
    for step in range(5):
        loss = model(torch.randn(1024, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "trained.pt")
"""


def test_steps_are_planned_whose_optimizer_is_compiled(tmp_path: Path):
    """As torchao's are: every step ran unplanned, for something compiled ran in it."""
    ran = inline(tmp_path, "3MiB", OPTIMIZER)
    (loop,) = ran.loops
    assert loop["refusal"] is None, ran.stderr
    assert loop["planned"]["steps"] >= 3
    assert loop["plan"]["actions"]
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]
