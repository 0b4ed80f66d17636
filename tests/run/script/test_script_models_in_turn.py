"""``memfit run --budget`` on scripts that train one model after the other, all of one make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import inline
from torch import nn
from torch.nn.utils import parametrizations

from memfit.run.script.similar_models import are_named, make_of

TRIALS = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)

    def blocks(width):
        layers = [it for _ in range(8) for it in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*layers)

    def train(model, optimizer, rows=1024, steps=4):
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(rows, 128)).square().mean()
            loss.backward()
            print("between")
            optimizer.step()
            print(repr(loss.item()))
        print(repr(sum(p.double().sum().item() for p in model.parameters())))

    first = blocks(128)
    for fold in range(4):
        model = {model}
        optimizer = {optimizer}
        train(model, optimizer)
"""
ADAM = "torch.optim.Adam(model.parameters())"


def _ran(
    folder: Path, budget: str, model: str = "blocks(128)", optimizer: str = ADAM, end: str = ""
):
    return inline(folder, budget, TRIALS.format(model=model, optimizer=optimizer) + end)


@pytest.mark.parametrize("model", ["blocks(128)", "copy.deepcopy(first)"])
def test_what_was_learnt_of_one_model_holds_for_the_next(tmp_path: Path, model: str) -> None:
    ran = _ran(tmp_path, "70%", model)
    (loop,) = ran.loops
    assert loop["observed"]["steps"] <= 2
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == 16
    assert {action["kind"] for action in loop["plan"]["actions"]}
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_a_model_of_another_make_is_recorded(tmp_path: Path) -> None:
    ran = _ran(tmp_path, "70%", "blocks(128).append(nn.Linear(128, 2 + fold))")
    assert len(ran.loops) == 4
    assert all(loop["observed"]["steps"] >= 1 for loop in ran.loops)


def test_another_optimizer_is_recorded(tmp_path: Path) -> None:
    other = "(torch.optim.Adam if fold % 2 else torch.optim.SGD)(model.parameters(), lr=1e-3)"
    loops = _ran(tmp_path, "70%", optimizer=other).loops
    assert [loop["optimizers"] for loop in loops] == [["SGD"], ["Adam"]]
    assert all(loop["observed"]["steps"] >= 1 for loop in loops)


def test_a_model_like_one_before_that_needs_more_is_recorded_in_its_turn(tmp_path: Path) -> None:
    """The same model and batch, and a loss that takes three times as much."""
    end = """
    def costly(model, optimizer):
        for step in range(8):
            optimizer.zero_grad()
            out = model(torch.randn(1024, 128))
            loss = sum(torch.sin(out * k).cosh().square().mean() for k in range(1, 13))
            loss.backward()
            print("between")
            optimizer.step()
            print(repr(loss.item()))

    model = blocks(128)
    costly(model, torch.optim.Adam(model.parameters()))
"""
    ran = _ran(tmp_path, "9MiB", end=end)
    (loop,) = ran.loops
    assert loop["observed"]["steps"] >= 2
    assert loop["planned"]["peak_bytes"] > loop["plan"]["budget_bytes"]  # once
    assert "a step that was recorded" not in ran.fitting["verdict"]["why"]


def test_a_make_is_of_names_shapes_and_classes_and_not_of_values() -> None:
    def net(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4))

    assert make_of(net()) == make_of(net())
    assert make_of(net()) != make_of(net(5))
    assert make_of(net()) != make_of(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))
    assert make_of(net()) != make_of(net().double())
    assert make_of(net()) != make_of(net().requires_grad_(requires_grad=False))
    with_norm = [nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))) for _ in range(2)]
    assert make_of(with_norm[0]) == make_of(with_norm[1])
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    assert are_named(["SGD"], [optimizer])
    assert not are_named(["SGD"], [])
    assert not are_named(["SGD", "Adam"], [optimizer])


CRITICISED = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 512))
    critic = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    of_actor = torch.optim.SGD(actor.parameters(), lr=0.01)
    for step in range(6):
        seen = torch.randn(32, 64)
        loss = critic(actor(seen).detach()).square().mean()
        of_critic.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        of_critic.step()
        score = critic(actor(seen)).mean()
        of_actor.zero_grad()
        score.backward()
        of_actor.step()
        print(repr(loss.item()), repr(score.item()))
    print(sum(p.grad.double().abs().sum().item() for p in critic.parameters()).hex())
"""


def test_gradients_that_another_models_loss_fills_wait_in_files(tmp_path: Path):
    """A critic of 8 MiB, whose gradients the actor's loss fills, too: 8 more."""
    ran = inline(tmp_path, "14MiB", CRITICISED, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert all(loop["observed"]["peak_bytes"] < 12 << 20 for loop in ran.loops)


def test_the_teacher_of_a_later_run_is_in_files_when_it_is_first_called(tmp_path: Path):
    """8.5 MiB of it, some more of its call, and from the second run on 4 more of what is kept."""
    (tmp_path / "disk").mkdir()
    ran = inline(
        tmp_path,
        "19MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    x = torch.rand(512, 1024)
    kept = []

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(1024, 256)
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))
            self.last = nn.Linear(256, 64)
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = torch.tanh(layer(x)) * 1.1
            return self.last(x)

    def run():
        teacher = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(True), nn.Linear(2048, 64))
        student = Student()
        optimizer = torch.optim.SGD(student.parameters(), 0.01)
        for step in range(4):
            with torch.no_grad():
                answers = teacher(x)
            loss = nn.functional.mse_loss(student(x), answers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))

    run()
    kept.append(torch.rand(4, 512, 512))
    run()
    print(kept[0].sum().item())
    """,
        offload=str(tmp_path / "disk"),
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_models_that_are_made_for_one_step_each_are_said_to_run_unplanned(tmp_path: Path):
    """As those of a meta-learner that copies its model for each task; once, when that is seen."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    for task in range(4):
        model = nn.Sequential(*[it for _ in range(8) for it in (nn.Linear(256, 256), nn.Tanh())])
        loss = model(torch.randn(1024, 256)).square().mean()
        loss.backward()
        print(repr(loss.item()), model[0].weight.grad.sum().item())
        del model, loss
    """
    ran = inline(tmp_path, "16MiB", code)
    line = "`Sequential` runs unplanned: each has one step, which is recorded, and is gone after it"
    assert ran.stderr.count(line) == 1
