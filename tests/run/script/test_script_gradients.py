"""``memfit run --budget`` on scripts that ask autograd for gradients on the way to their loss."""

from __future__ import annotations

from pathlib import Path

from ran import inline

NET = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 64
    class Penalty(nn.Sequential): pass
    class Attacked(nn.Sequential): pass
    class ByHand(nn.Sequential): pass

    def train(kind, loss_of):
        layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())]
        model = kind(*layers)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(4):
            loss = loss_of(model, torch.randn(1024, width))
            optimizer.step()
            optimizer.zero_grad()
            print(repr(loss.item()), repr(sum(p.sum().item() for p in model.parameters())))
"""


def test_gradients_on_the_way_are_part_of_the_forward(tmp_path: Path):
    ran = inline(
        tmp_path,
        "80%",
        NET
        + """
    def penalty(model, x):
        x.requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    def attacked(model, x):
        for _ in range(2):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().mean(), x)
            x = x + 0.1 * slope.sign()
        loss = model(x.detach()).square().mean()
        loss.backward()
        return loss

    train(Penalty, penalty)
    train(Attacked, attacked)
    """,
    )
    for loop in ran.loops:
        assert loop["refusal"] is None
        plan, planned = loop["plan"], loop["planned"]
        assert planned["peak_bytes"] <= plan["predicted_peak_bytes"] < plan["unplanned_peak_bytes"]
        assert (loop["planned"]["steps"], loop["unplanned"]["steps"]) == (3, 0)


def test_gradients_that_the_script_puts_in_place_itself_are_named(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        NET
        + """
    def by_hand(model, x):
        loss = model(x).square().mean()
        parameters = list(model.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = gradient
        return loss

    train(ByHand, by_hand)
    """,
    )
    assert "`ByHand` runs unplanned: it asks autograd for gradients" in ran.stderr
    assert all(loop["planned"]["steps"] == 0 for loop in ran.loops)
