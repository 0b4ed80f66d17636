"""``memfit run --budget`` on models that are called by methods of their own, or by their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ran import Ran, inline

AGENT = """
    import torch
    from torch import nn
    from torch.distributions import Normal

    torch.manual_seed(0)
    mlp = lambda out: nn.Sequential(
        nn.Linear(24, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, out)
    )

    class Agent(BASE):
        def __init__(self):
            super().__init__()
            self.critic, self.actor = mlp(1), mlp(8)
            self.log_std = nn.Parameter(torch.zeros(8))

        def trained(self):
            return [*self.critic.parameters(), *self.actor.parameters(), self.log_std]

        def value(self, x):
            return self.critic(x)

        def action_and_value(self, x, action=None):
            mean = self.actor(x)
            chances = Normal(mean, self.log_std.expand_as(mean).exp())
            action = chances.sample() if action is None else action
            return action, chances.log_prob(action).sum(1), self.critic(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.trained(), lr=1e-3)
    for iteration in range(3):
        with torch.no_grad():
            seen = torch.randn(1024, 24)
            actions = torch.cat([agent.action_and_value(x)[0] for x in seen.split(128)])
            wanted = torch.cat([agent.value(x) for x in seen.split(128)]) + 1
        for count in (1024, 1024, 640, 1024):
            chosen = torch.randperm(1024)[:count]
            _, chance, value = agent.action_and_value(seen[chosen], actions[chosen])
            loss = (value - wanted[chosen]).square().mean() - (chance * value.detach()[:, 0]).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.trained(), 0.5)
            optimizer.step()
            print(repr(loss.item()), repr(norm.item()))
    torch.save([p.detach() for p in agent.trained()], "agent.pt")
"""
OF_AGENT = 2 * (24 * 384 + 384 + 384 * 384 + 384) + 9 * 385 + 8


def kinds(loop: dict[str, Any]) -> set[str]:
    return {action["kind"] for action in loop["plan"]["actions"]}


def assert_kept(ran: Ran) -> None:
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert not any(loop["refusal"] for loop in ran.loops)
    assert not any(loop["unplanned"]["steps"] for loop in ran.loops)


@pytest.mark.parametrize("base", ["nn.Module", "object"])
def test_the_whole_of_an_agent_is_planned_whatever_class_holds_it(tmp_path: Path, base: str):
    ran = inline(tmp_path, "9MiB", AGENT.replace("BASE", base), offload=str(tmp_path))
    (loop,) = ran.loops
    assert loop["parameters"] == OF_AGENT
    assert loop["models"] == ["Agent" if base == "nn.Module" else "Sequential"]
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == 12
    assert "offload_optimizer" in kinds(loop)
    assert_kept(ran)


PARTS = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    half = lambda i, o: nn.Sequential(nn.Linear(i, 512), nn.GELU(), nn.Linear(512, o))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = half(512, 64), half(32, 512)
            self.shift = nn.Parameter(torch.zeros(512))

        def encode(self, x):
            return self.encoder(x + self.shift).chunk(2, dim=1)

        def decode(self, z):
            return self.decoder(z) - self.shift

        def forward(self, x):
            mean, log_variance = self.encode(x)
            return self.decode(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))

        def loss(self, x):
            return F.mse_loss(self(x), x)

    model = Model()
    sums = []
    model.decoder.register_forward_hook(lambda module, args, out: sums.append(out.sum().item()))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        x = torch.rand(1024, 512)
        optimizer.zero_grad()
        STEP
        print(repr(loss.item()))
        print([repr(p.grad.sum().item()) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        with torch.no_grad():
            print(repr(model.decode(torch.randn(64, 32)).sum().item()))
    print(sums)
    torch.save(model.state_dict(), "model.pt")
"""
OF_MODEL = 2 * (512 * 512 + 512) + 512 * 64 + 64 + 32 * 512 + 512 + 512
STEPS = {
    "parts": """
        mean, log_variance = model.encode(x)
        out = model.decode(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
        loss = F.mse_loss(out, x)
        loss.backward()""",
    "two backward calls": """
        mean, log_variance = model.encode(x)
        loss = mean.square().mean() + log_variance.square().mean()
        loss.backward(retain_graph=True)
        other = F.mse_loss(model.decode(mean), x)
        other.backward()""",
    "calls itself": """
        loss = model.loss(x)
        loss.backward()""",
    "several kinds": """
        if step % 4 == 3:
            loss = F.mse_loss(model.decode(x[:, :32]), x)
        else:
            loss = F.mse_loss(model.decode(model.encode(x)[0]), x)
        loss.backward()""",
}


@pytest.mark.parametrize(
    ("step", "budget"),
    [
        ("parts", "23MiB"),
        ("two backward calls", "18MiB"),
        ("calls itself", "23MiB"),
        ("several kinds", "20MiB"),
    ],
)
def test_a_model_called_by_its_parts_is_planned_as_a_whole(tmp_path: Path, step: str, budget: str):
    script = PARTS.replace("        STEP\n", STEPS[step].removeprefix("\n") + "\n")
    ran = inline(tmp_path, budget, script, offload=str(tmp_path))
    (loop,) = ran.loops
    assert (loop["models"], loop["parameters"]) == (["Model"], OF_MODEL)
    assert kinds(loop), "the budget asks for something"
    assert loop["planned"]["steps"] >= 5
    assert_kept(ran)


def test_parts_with_optimizers_of_their_own_are_loops_of_their_own(tmp_path: Path):
    script = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    layer = lambda i, o: nn.Sequential(nn.Linear(i, o), nn.LeakyReLU(0.2))

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.widen, self.made = layer(64, 384), nn.Linear(384, 384)
            self.look, self.judged = layer(384, 384), nn.Linear(384, 1)

        def make(self, z):
            return self.made(self.widen(z))

        def judge(self, x):
            return self.judged(self.look(x))

    gan = Gan()
    parts = (gan.widen, gan.made), (gan.look, gan.judged)
    makers, judges = ([p for part in half for p in part.parameters()] for half in parts)
    of_maker, of_judge = torch.optim.Adam(makers), torch.optim.Adam(judges)
    loss = F.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(1024, 1), torch.zeros(1024, 1)
    for step in range(6):
        made = gan.make(torch.randn(1024, 64))
        found = loss(gan.judge(torch.rand(1024, 384)), ones)
        of_judge.zero_grad()
        (found + loss(gan.judge(made.detach()), zeros)).backward()
        of_judge.step()
        fooled = loss(gan.judge(made), ones)
        of_maker.zero_grad()
        fooled.backward()
        of_maker.step()
        print(repr(found.item()), repr(fooled.item()))
    torch.save(gan.state_dict(), "gan.pt")
    """
    ran = inline(tmp_path, "13MiB", script, offload=str(tmp_path))
    sizes = {loop["parameters"] for loop in ran.loops}
    assert sizes == {64 * 384 + 384 + 384 * 384 + 384, 384 * 384 + 384 + 385}
    assert_kept(ran)


def test_a_part_runs_in_pieces_of_the_batch(tmp_path: Path):
    script = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            widths = (64, 1024, 1024, 64)
            self.body = nn.Sequential(*[m for i, o in zip(widths, widths[1:])
                                        for m in (nn.Linear(i, o), nn.GELU())])
            self.head = nn.Linear(64, 1)

        def loss(self, x):
            return self.head(self.body(x)).square().mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        loss = model.loss(torch.randn(2048, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    """
    allowed = ["--allow", "equivalent"]
    ran = inline(tmp_path, "24MiB", script, fitting=allowed)
    (loop,) = ran.loops
    assert loop["models"] == ["Model"]
    assert "micro_batch" in kinds(loop)
    assert_kept(ran)
