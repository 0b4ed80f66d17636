"""A step of several optimizers, each of which trains a module or a part of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

PARTS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Encoder(nn.Sequential): pass
    class Decoder(nn.Sequential): pass
    encoder = Encoder(nn.Linear(512, 512))
    decoder = Decoder(*[nn.Linear(512, 512) for _ in range(10)])
    optimizers = OPTIMIZERS
    for step in range(8):
        loss = decoder(encoder(torch.randn(64, 512))).square().mean()
        for it in optimizers:
            it.zero_grad()
        loss.backward()
        for it in optimizers:
            it.step()
        print(repr(loss.item()))
    moments = [s["exp_avg_sq"] for it in optimizers for s in it.state_dict()["state"].values()]
    torch.save([*encoder.parameters(), *decoder.parameters(), *moments], "trained.pt")
"""
"""It takes 50 MiB: parameters, gradients and state 44, and temporaries of the decoder's updates."""


@pytest.mark.parametrize(
    "optimizers",
    [
        "[torch.optim.Adam(it.parameters()) for it in (encoder, decoder)]",
        "[torch.optim.Adam(it.parameters()) for it in (decoder, encoder)]",
        "[torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])]",
    ],
)
def test_state_of_every_part_of_a_step_makes_room(tmp_path: Path, optimizers: str):
    """Only that of the first model called was planned for; the others' stayed."""
    ran = inline(tmp_path, "30MiB", PARTS.replace("OPTIMIZERS", optimizers), offload=str(tmp_path))
    assert len(ran.loops) == 1
    assert ran.fitting["verdict"]["kept"]


def test_temporaries_of_every_part_of_a_step_make_room(tmp_path: Path):
    """With nothing offloaded: updates of all of a decoder at once take much more than one."""
    both = "[torch.optim.Adam(it.parameters(), foreach=True) for it in (encoder, decoder)]"
    ran = inline(tmp_path, "48MiB", PARTS.replace("OPTIMIZERS", both))
    assert ran.fitting["verdict"]["kept"]


ONE = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
            self.head = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        def forward(self, x):
            return self.head(self.body(x))
    net = Net()
    slow = torch.optim.Adam(net.body.parameters(), 1e-4)
    fast = torch.optim.AdamW(net.head.parameters())
    for step in range(8):
        x = torch.randn(64, 512)
        loss = nn.functional.mse_loss(net(x), x)
        slow.zero_grad()
        fast.zero_grad()
        loss.backward()
        STEPS
        print(repr(loss.item()))
    moments = [s["exp_avg_sq"] for it in (slow, fast) for s in it.state_dict()["state"].values()]
    torch.save([net.state_dict(), moments], "trained.pt")
"""
"""It takes 43 MiB: parameters, gradients and state 40, and temporaries of an update."""


@pytest.mark.parametrize(
    "steps",
    [
        "slow.step(); fast.step()",
        "fast.step(); slow.step()",
        "slow.step() if step % 2 else None; fast.step()",
    ],
)
def test_parts_of_one_module_have_optimizers_of_their_own(tmp_path: Path, steps: str):
    """Plans knew the updates of the one that steps first, and took the other's for nothing."""
    ran = inline(tmp_path, "24MiB", ONE.replace("STEPS", steps), offload=str(tmp_path))
    (loop,) = ran.loops
    assert sorted(loop["optimizers"]) == ["Adam", "AdamW"]
    assert ran.fitting["verdict"]["kept"]
    assert "before its optimizers step" not in ran.stderr
    assert not any(note.startswith("predicted without updates") for note in loop["notes"])
    assert loop["planned"]["peak_bytes"] <= 1.001 * loop["plan"]["predicted_peak_bytes"]


@pytest.mark.parametrize("foreach", ["", ", foreach=True"])
@pytest.mark.parametrize(("budget", "offload"), [("100MiB", None), ("48MiB", None), ("30MiB", "x")])
def test_updates_in_no_plan_are_predicted(
    tmp_path: Path, foreach: str, budget: str, offload: str | None
):
    """As they are made: all at once, one by one, or with their state elsewhere meanwhile."""
    both = f"[torch.optim.Adam(it.parameters(){foreach}) for it in (decoder, encoder)]"
    place = None if offload is None else str(tmp_path)
    (loop,) = inline(tmp_path, budget, PARTS.replace("OPTIMIZERS", both), offload=place).loops
    measured, predicted = loop["planned"]["peak_bytes"], loop["plan"]["predicted_peak_bytes"]
    assert measured == pytest.approx(predicted, rel=0.001)


def test_the_updates_of_the_second_optimizer_are_said_to_be_too_large(tmp_path: Path):
    """The pass ends with the step of the first, and fits."""
    code = ONE.replace("STEPS", "slow.step(); fast.step()").replace(
        "torch.optim.AdamW(net.head.parameters())",
        "torch.optim.AdamW(net.head.parameters(), foreach=True)",
    )
    ran = inline(tmp_path, "43MiB", code, fitting=["--forbid", "one_by_one"])
    (loop,) = ran.loops
    assert loop["plan"]["fits"]
    assert "in its updates, which no plan lowers, above 43.0 MiB" in ran.stderr
    assert not ran.fitting["verdict"]["kept"]


def test_what_others_options_would_reach_changes_no_plan(tmp_path: Path):
    """Gradients live through forward; `--offload`, which is offered, would have them elsewhere."""
    code = ONE.replace("STEPS", "slow.step(); fast.step()").replace("randn(64", "randn(256")
    ran = inline(tmp_path, "43MiB", code)
    (loop,) = ran.loops
    assert not loop["plan"]["fits"]
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]


TURNS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Generator(nn.Sequential): pass
    class Critic(nn.Sequential): pass
    generator = Generator(*[nn.Linear(512, 512) for _ in range(10)])
    critic = Critic(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-4)
    of_critic = torch.optim.Adam(critic.parameters(), 1e-4)
    for step in range(8):
        fake = generator(torch.randn(64, 512))
        critic.requires_grad_(True)
        of_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.randn(64, 512)).mean()).backward()
        of_critic.step()
        critic.requires_grad_(False)
        of_generator.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        of_generator.step()
        print(repr(loss.item()))
    torch.save([*generator.parameters(), *critic.parameters()], "trained.pt")
"""
"""It takes 48 MiB: parameters, gradients and state 44, and what forward keeps."""


def test_a_critic_is_trained_between_its_generators_forward_and_backward(tmp_path: Path):
    """As in pix2pix: the passes of both end with the step of the other's optimizer."""
    ran = inline(tmp_path, "28MiB", TURNS, offload=str(tmp_path))
    assert [loop["models"][0] for loop in ran.loops] == ["Generator", "Critic"]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    for loop in ran.loops:
        assert loop["planned"]["peak_bytes"] <= 1.001 * loop["plan"]["predicted_peak_bytes"]
