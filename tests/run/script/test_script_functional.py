"""``memfit run --budget`` on scripts that train by ``torch.func``."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

NET = """
    import torch
    from torch import nn
    from torch.func import functional_call, grad_and_value, vmap

    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = nn.Sequential(*layers)
"""


def test_steps_by_tensors_that_are_no_parameters_are_planned(tmp_path: Path) -> None:
    ran = inline(
        tmp_path,
        "75%",
        NET
        + """
    params = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    optimizer = torch.optim.Adam(list(params.values()))
    for step in range(6):
        loss = functional_call(net, params, (torch.randn(2048, 64),)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    print(repr(sum(p.sum().item() for p in params.values())))
    """,
    )
    (loop,) = ran.loops
    assert (loop["refusal"], loop["planned"]["steps"] >= 4) == (None, True)
    assert loop["plan"]["fits"]
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_a_call_under_a_transform_runs_unplanned_and_the_others_do_not(tmp_path: Path) -> None:
    ran = inline(
        tmp_path,
        "75%",
        NET
        + """
    def loss_of(params, x):
        return functional_call(net, params, (x[None],)).square().mean()

    per_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0))
    grads, losses = per_sample(dict(net.named_parameters()), torch.randn(8, 64))
    print(repr(losses.sum().item()), repr(grads["0.weight"].sum().item()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        loss = net(torch.randn(2048, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    assert (loop["refusal"], loop["planned"]["steps"] >= 4) == (None, True)
    under = "some steps run unplanned: the script runs under a transform of `torch.func`"
    assert under in loop["notes"]
    assert ran.stderr.index(f"memfit: `Sequential`: {under}") < ran.stderr.index("Budget")


TRANSFORMED = """
    x = torch.randn(2048, 64)
    params = {k: v.detach().clone() for k, v in net.named_parameters()}
    def loss_of(params, x):
        return functional_call(net, params, (x,)).square().mean()

    for step in range(4):
        grads, loss = grad_and_value(loss_of)(params, x)
        params = {k: p - 0.1 * grads[k] for k, p in params.items()}
        print(repr(loss.item()), repr(sum(p.sum().item() for p in params.values())))
"""
ENSEMBLE = """
    params = {k: torch.stack([v.detach()] * 4).requires_grad_() for k, v in net.named_parameters()}
    base, x = net.to("meta"), torch.randn(512, 64)
    optimizer = torch.optim.Adam(params.values())
    for step in range(4):
        out = vmap(lambda params, x: functional_call(base, params, (x,)), (0, None))(params, x)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(out.sum().item()), repr(sum(p.sum().item() for p in params.values())))
"""


@pytest.mark.parametrize(
    "code", [TRANSFORMED, ENSEMBLE.replace("net.to", "net.requires_grad_(False).to")]
)
def test_what_runs_under_transforms_alone_is_named_and_a_percentage_of_it_not_judged(
    tmp_path: Path, code: str
):
    ran = inline(tmp_path, "75%", NET + code)
    assert "under a transform of `torch.func`" in ran.stderr[: ran.stderr.index("Budget")]
    assert ran.fitting["verdict"] is None
    assert "not judged: what 75% comes to is not known" in ran.stderr


def test_what_runs_under_transforms_keeps_bytes_by_files(tmp_path: Path):
    ran = inline(tmp_path, "5MiB", NET + TRANSFORMED, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr
