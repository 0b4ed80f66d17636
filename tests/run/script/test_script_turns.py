"""``memfit run --budget`` where passes begin with the same call and other optimizers end them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import inline
from torch import nn

from memfit.run.script.planned_step import Call
from memfit.run.script.turns import Turns

GAN = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    discriminator = nn.Sequential(nn.Linear(256, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
    by_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    by_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
    loss_of = nn.BCEWithLogitsLoss()
    for step in range(8):
        fake = generator(torch.randn(1024, 32))
        by_discriminator.zero_grad()
        real = loss_of(discriminator(torch.rand(1024, 256)), torch.ones(1024, 1))
        loss = real + loss_of(discriminator(fake.detach()), torch.zeros(1024, 1))
        loss.backward()
        by_discriminator.step()
        fake = generator(torch.randn(1024, 32))
        by_generator.zero_grad()
        fooled = loss_of(discriminator(fake), torch.ones(1024, 1))
        fooled.backward()
        by_generator.step()
        print(repr(loss.item()), repr(fooled.item()))
"""


@pytest.mark.parametrize("budget", ["90%", "75%"])
def test_each_update_runs_by_a_plan_of_its_own(tmp_path: Path, budget: str):
    ran = inline(tmp_path, budget, GAN)
    [loop] = [loop for loop in ran.loops if loop["plan"]]
    assert loop["divergence"] is None
    assert 2 <= loop["observed"]["steps"] <= 4
    assert loop["planned"]["steps"] == 16 - loop["observed"]["steps"]
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]


ONE = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)), nn.Linear(64, 8)
    model = nn.Sequential(body, head)
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.01) for it in (body, head)]
    for step in range(8):
        model.zero_grad()
        loss = model(torch.randn(1024, 64)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(repr(loss.item()))
"""


def test_two_optimizers_after_one_backward_take_no_turns(tmp_path: Path):
    [loop] = inline(tmp_path, "75%", ONE).loops
    assert loop["observed"]["steps"] <= 2
    assert loop["divergence"] is None


SEARCH = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
            self.choice = nn.Parameter(torch.zeros(3))
        def forward(self, x):
            for _ in range(4):
                weights = self.choice.softmax(0)
                x = sum(weight * path(x).tanh() for weight, path in zip(weights, self.paths))
            return x
    net = Net()
    of_choice = torch.optim.Adam([net.choice], lr=0.01)
    of_paths = torch.optim.SGD(net.paths.parameters(), lr=0.1)
    for step in range(8):
        for optimizer in (of_choice, of_paths):
            optimizer.zero_grad()
            loss = net(torch.rand(512, 256)).square().mean()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
"""


def test_each_turn_is_planned_though_each_begins_with_the_gradients_of_the_other(tmp_path: Path):
    """All were recorded, eight at most: none began with the gradients of the one before it."""
    [loop] = inline(tmp_path, "75%", SEARCH).loops
    assert loop["observed"]["steps"] <= 4
    assert loop["planned"]["steps"] == 16 - loop["observed"]["steps"]


def test_an_optimizer_of_another_model_takes_no_turn():
    """However long the one before lives, which depends on who holds it."""
    turns, seen = Turns(), torch.rand(2, 4)
    models = [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        call = Call(model, ((seen,), {}), "")
        turns.ended(call.key, optimizer, model)
        assert turns.told_apart(call, model).turn == 0


def test_an_optimizer_that_comes_later_has_a_number_of_its_own():
    turns, seen, model = Turns(), torch.rand(2, 4), nn.Linear(4, 4)
    call = Call(model, ((seen,), {}), "")
    first, second = (torch.optim.SGD(model.parameters()) for _ in range(2))
    turns.ended(call.key, first, model)
    turns.ended(call.key, second, model)
    del first
    before = turns.told_apart(call, model).turn
    turns.ended(call.key, torch.optim.SGD(model.parameters()), model)
    assert before != turns.told_apart(call, model).turn > 0


def test_what_is_chosen_for_several_loops_is_said_once(tmp_path: Path):
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class One(nn.Sequential): pass
    class Other(nn.Sequential): pass
    for kind in (One, Other):
        model = kind(*[it for _ in range(6) for it in (nn.Linear(256, 256), nn.Tanh())])
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(4):
            loss = model(torch.randn(512, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(repr(loss.item()))
    """
    ran = inline(tmp_path, "5MiB", code, offload="chosen")
    assert len(ran.loops) == 2
    lines = [line for line in ran.stderr.splitlines() if line.startswith("memfit: ")]
    assert any("what lacks room is offloaded" in line for line in lines)
    assert len(lines) == len(set(lines)), ran.stderr
