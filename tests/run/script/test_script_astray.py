"""Steps that are not as recorded: other ops, more calls of the model, another mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

from memfit.run.script.recorder_steps import AS_RECORDED, THOUGH_A_PLAN_FITS

NET = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        def forward(self, x, way=torch.tanh):
            for layer in self.layers:
                x = way(layer(x)) + 0.1
            return x

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def end(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
"""

ASTRAY = {
    # Saved after the step has left its plan: 4 MiB in memory.
    "other ops": """
    for step in range(6):
        way = (torch.tanh, torch.sigmoid)[step % 2]
        end(model(torch.randn(1024, 64), way).square().mean())
""",
    # One that the plan stores is larger first, and what follows has other ops.
    "larger, then other ops": """
    def mask(count):
        return torch.arange(1024) < count

    for step in range(6):
        out = model(torch.randn(1024, 64))[mask(512 + step % 2)]
        for way in [(torch.sin, torch.cos), (torch.tanh, torch.sigmoid)][step % 2] * 24:
            out = way(out) * 1.01
        end(out.square().mean())
""",
    # As often as it may be, the loop is planned again; then each call saves 1 MiB.
    "more calls": """
    for more in range(4):
        end(model(torch.randn(*[1] * more, 160 + 32 * more, 64)).square().mean())
    end(sum(model(torch.randn(1, 1, 1, 256, 64)).square().mean() for _ in range(14)))
""",
    # The first plan is for what is computed before training, and fits nothing.
    "other mode": """
    first = [model(torch.randn(4096, 64)) for _ in range(2)]
    first = sum(first).square().mean()
    model.eval()
    for step in range(5):
        loss = model(torch.randn(4096, 64))
        loss = loss * loss.sin().cos().exp().mean()
        end(loss.square().mean())
""",
}


BUDGETS = {
    "other ops": "2.5MiB",
    "larger, then other ops": "3MiB",
    "more calls": "10MiB",
    "other mode": "11MiB",
}


@pytest.mark.parametrize("way", ASTRAY)
def test_a_step_that_is_not_as_recorded_keeps_the_budget(tmp_path: Path, way: str):
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, BUDGETS[way], NET + ASTRAY[way], offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert all(loop["unplanned"]["steps"] == 0 for loop in ran.loops)


ROUTED = """
    for step in range(12):
        out = model(torch.randn(1024, 64))
        for part in range(1 + step % 3):
            out = out[torch.arange(len(out)) < len(out) - step * 8].sin().cos()
        end(out.square().mean())
"""


def test_steps_that_depend_on_values_are_recorded_again_twice_at_most(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "3MiB", NET + ROUTED, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert loop["observed"]["steps"] <= 4
    assert ran.fitting["verdict"]["kept"], ran.stderr


SOLVED = """
    for parts in (2, 2, 2, 1, 3, 2, 1, 3, 3, 1, 3, 2):
        out = model(torch.randn(4096, 64))
        for part in range(parts):
            out = out.sin()
        room = 6 if parts == 3 else 0
        out.register_hook(lambda grad: sum([grad + i for i in range(room)], start=grad))
        end(out.square().mean())
"""
"""As a fixed point that takes more steps at times, in backward too: 1 MiB each."""


def test_what_has_left_its_plan_before_runs_as_recorded(tmp_path: Path):
    """Its plan keeps in memory what there is room for, which another pass would need: 6 MiB more.

    Among tensors as large as each other, measured times would choose which one is recomputed, and
    with it what the first pass takes that leaves the plan: 12.1, 13.1 or 14.1 MiB. Offloaded ones
    make it 12.1.
    """
    (tmp_path / "disk").mkdir()
    disk, fitting = str(tmp_path / "disk"), ("--forbid", "remat")
    ran = inline(tmp_path, "13.5MiB", NET + SOLVED, offload=disk, fitting=fitting)
    (loop,) = ran.loops
    assert loop["divergence"]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert loop["plan"]["fits"]
    assert THOUGH_A_PLAN_FITS in loop["notes"]
    assert AS_RECORDED not in loop["notes"]


LEFT_OUT = """
    class Skips(Net):
        def forward(self, x):
            for layer in self.layers[: 3 if self.steps < 2 else 8]:
                x = torch.tanh(torch.sin(layer(x)))
            return x

    model = Skips()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for model.steps in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(4096, 64)).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


@pytest.mark.parametrize(("budget", "without"), [("9.5MiB", "offload"), ("7.8MiB", "remat")])
def test_modules_that_the_recorded_step_did_not_call_save_elsewhere(
    tmp_path: Path, budget: str, without: str
):
    """As layers that are dropped at random: the plan knows nothing of them.

    One recomputes, the other offloads all that the recorded step saves. Measured times would choose
    a mixture, and with it what the pass takes that leaves its plan, as above.
    """
    (tmp_path / "disk").mkdir()
    disk, fitting = str(tmp_path / "disk"), ("--forbid", without)
    ran = inline(tmp_path, budget, NET + LEFT_OUT, offload=disk, fitting=fitting)
    assert ran.fitting["verdict"]["kept"], ran.stderr
    (loop,) = ran.loops
    assert loop["divergence"] == "it calls `layers.3`, which the recorded step did not"
    assert loop["observed"]["steps"] == 2


GRADIENTS_ON = """
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(6))
            )
        def forward(self, x):
            return self.layers(x)

    model = Norms()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(2):
        model.train()
        for step in range(4):
            end(sum(model(torch.randn(2048, 64)).square().mean() for _ in range(2)))
        model.eval()
        for batch in range(3):
            out = model(torch.randn(6144, 64))
            print(repr(out.square().mean().item()))
"""


@pytest.mark.parametrize("budget", ["13MiB", "16MiB"])
def test_an_evaluation_with_gradients_on_keeps_the_budget(tmp_path: Path, budget: str):
    """It is in another mode than what was planned, whatever the plan watches."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, budget, NET + GRADIENTS_ON, offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr


THAWS = """
    import torch.nn.utils.prune as prune
    for layer in model.layers[:7] if {frozen} else ():
        layer.requires_grad_(False)
    for step in range(8):
        if step == 4:
            model.requires_grad_(True)
            for layer in () if {frozen} else model.layers:
                prune.l1_unstructured(layer, "weight", 0.5)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
        out = model(torch.randn(4096 if {frozen} else 32, 64))
        end(out.square().mean())
"""


@pytest.mark.parametrize(("frozen", "budget"), [(True, "10MiB"), (False, "1.1MiB")])
def test_a_model_whose_parameters_are_others_is_recorded_again(
    tmp_path: Path, *, frozen: bool, budget: str
):
    """Layers that are thawed save more; pruned ones compute their weights, which are others."""
    (tmp_path / "disk").mkdir()
    code = NET + THAWS.format(frozen=frozen)
    ran = inline(tmp_path, budget, code, offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    (loop,) = ran.loops
    assert loop["divergence"] is None
    # `out` is held in a variable: where that is much, a second step shows where it goes.
    assert loop["observed"]["steps"] == 2 + frozen
