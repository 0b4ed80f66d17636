"""Forwards with gradients on that get no backward."""

from __future__ import annotations

from pathlib import Path

import torch
from ran import inline
from torch import nn

from memfit.run.script.differentiable import Wanted

ACTS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Policy(nn.Sequential): pass
    class Critic(nn.Sequential): pass
    policy = Policy(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    critic = Critic(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    of_policy, of_critic = (torch.optim.Adam(m.parameters()) for m in (policy, critic))
    for acted in range(ACTED):
        policy(torch.randn(1, 256)).detach()
    for step in range(8):
        action = policy(torch.randn(1, 256)).detach()
        loss = (critic(torch.randn(256, 256)) - action.mean()).square().mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        gain = critic(policy(torch.randn(256, 256))).mean()
        of_policy.zero_grad()
        gain.backward()
        of_policy.step()
        print(repr(loss.item()), repr(gain.item()))
"""

DETACHED = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Maker(nn.Sequential): pass
    class Judge(nn.Sequential): pass
    maker = Maker(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 256))
    judge = Judge(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)
    )
    of_maker, of_judge = (torch.optim.Adam(m.parameters()) for m in (maker, judge))
    for step in range(8):
        made = maker(torch.randn(256, 64))FIRST
        real, fake = judge(torch.randn(256, 256)), judge(made.detach())
        loss = nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        fooled = nn.functional.softplus(-judge(AGAIN)).mean()
        of_maker.zero_grad()
        fooled.backward()
        of_maker.step()
        print(repr(loss.item()), repr(fooled.item()))
"""


def test_what_acts_with_gradients_on_leaves_others_their_steps(tmp_path: Path):
    """The policy's forward, which nobody differentiates, took the critic's step for its own."""
    ran = inline(tmp_path, "24MiB", ACTS.replace("ACTED", "0"), offload=str(tmp_path))
    assert [loop["models"] for loop in ran.loops] == [["Policy", "Critic"], ["Critic"]]
    assert ran.fitting["verdict"]["kept"]
    assert {loop["observed"]["steps"] + loop["planned"]["steps"] for loop in ran.loops} == {8}


def test_forwards_that_get_no_backward_are_not_recorded_for_ever(tmp_path: Path):
    ran = inline(tmp_path, "24MiB", ACTS.replace("ACTED", "300"), offload=str(tmp_path))
    assert not any(loop["refusal"] for loop in ran.loops)
    assert ran.fitting["verdict"]["kept"]


def test_what_is_made_without_its_graph_leaves_the_judge_its_step(tmp_path: Path):
    script = DETACHED.replace("FIRST", ".detach()").replace("AGAIN", "maker(torch.randn(256, 64))")
    ran = inline(tmp_path, "30MiB", script, offload=str(tmp_path))
    assert [loop["models"] for loop in ran.loops] == [["Maker", "Judge"], ["Judge"]]


def test_what_is_made_once_and_used_with_its_graph_later_is_one_step(tmp_path: Path):
    script = DETACHED.replace("FIRST", "").replace("AGAIN", "made")
    ran = inline(tmp_path, "40MiB", script, offload=str(tmp_path))
    assert ran.loops[0]["models"] == ["Maker", "Judge"]


def test_nothing_is_wanted_once_every_graph_that_was_returned_is_gone():
    layer, wanted = nn.Linear(2, 2), Wanted()
    assert not wanted.is_nothing(), "nothing was returned"
    wanted.returned(layer(torch.randn(2, 2)).detach())
    assert not wanted.is_nothing(), "no graph was returned"
    first, second = layer(torch.randn(2, 2)), layer(torch.randn(2, 2))
    wanted.returned({"first": first, "others": [second]})
    loss = first.sum()
    del first, second
    assert not wanted.is_nothing(), "the loss is made from the first"
    del loss
    assert wanted.is_nothing()


def test_what_is_written_to_is_still_wanted():
    layer, wanted = nn.Linear(4, 4), Wanted()
    logits = layer(torch.randn(2, 4)).view(4, 2)
    wanted.returned(logits)
    logits /= 2
    assert not wanted.is_nothing()
    del logits
    assert wanted.is_nothing()


EVALUATES = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh())
    model = nn.Sequential(*[block() for _ in range(12)])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = torch.randn(2048, 64)
    for epoch in range(8):
        model.train()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        model.eval()
        print(repr(model(data).square().mean().item()))
"""


def test_evaluations_with_gradients_on_keep_the_budget(tmp_path: Path):
    """Each keeps 12 activations of 512 KiB in its graph until the next training step."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "6MiB", EVALUATES, offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert all(loop["unplanned"]["steps"] == 0 for loop in ran.loops)


GENERATES = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Speaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(64, 256)
            self.head = nn.Linear(256, 64)
        def forward(self, x, state):
            state = self.cell(x, state)
            return self.head(state), state
    model = Speaks()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(12):
        state, loss = torch.zeros(128, 256), 0
        for token in range(24):
            x = torch.randn(128, 64)
            made, state = model(x, state)
            loss += nn.functional.mse_loss(made, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
        if step % 3 == 2:
            x, state = torch.randn(1, 64), torch.zeros(1, 256)
            for token in range(50):
                x, state = model(x, state)
            print(repr(x.sum().item()))
            del x, state
"""


def test_a_step_begins_anew_after_a_generation_with_gradients_on(tmp_path: Path):
    """One pass took in 50 calls that generate and the first of the step after them."""
    ran = inline(tmp_path, "20MiB", GENERATES)
    (loop,) = ran.loops
    assert loop["divergence"] is None
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == 12
    assert ran.fitting["verdict"]["kept"]


SCORES = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    images = torch.randn(16384, 256)
    for again in range(4):
        ballast = torch.ones(again // 2 * 12 << 18)
        print(repr(model(images).sum().item() + ballast.sum().item()))
    for step in range(4):
        loss = model(torch.randn(64, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_what_ran_over_is_told_by_its_own_cause(tmp_path: Path):
    """A note about something else was named as the cause."""
    no_overflow = ("--forbid", "offload_parameters")
    ran = inline(tmp_path, "40MiB", SCORES, offload=str(tmp_path), fitting=no_overflow)
    (loop,) = ran.loops
    assert loop["notes"]
    assert "got no backward" in ran.fitting["verdict"]["why"]
