"""Training with neither modules nor optimizers: plain functions, `backward()`, updates by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import assert_within_budget, inline

from memfit.run.script.trained_by_hand import TrainedByHand

NET = """
    import torch

    torch.manual_seed(0)
    weights = [(torch.randn(128, 128) / 11).requires_grad_() for _ in range(8)]
    biases = [torch.zeros(128, requires_grad=True) for _ in range(8)]

    def net(x):
        for weight, bias in zip(weights, biases):
            x = torch.tanh(x @ weight + bias) * 1.1
        return x
"""

ZEROED = """
    for step in range(8):
        x = torch.randn(2048, 128)
        loss = (net(x) - x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in weights + biases:
                p -= 0.1 * p.grad
                p.grad.zero_()
        print(repr(loss.item()))
"""

DATA = """
    for step in range(8):
        x = torch.randn(2048, 128)
        loss = (net(x) - x).square().mean()
        for p in weights + biases:
            p.grad = None
        loss.backward()
        for p in weights + biases:
            p.data += -0.1 * p.grad
        print(repr(loss.item()))
    with torch.no_grad():
        print(net(torch.randn(16384, 128)).sum().item())
"""

TWICE = """
    for step in range(8):
        x = torch.randn(1024, 128)
        y = net(x)
        (y - x).square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        with torch.no_grad():
            for p in weights + biases:
                p -= 0.1 * p.grad
                p.grad.zero_()
        print(repr(weights[0].sum().item()))
"""


@pytest.mark.parametrize(
    ("code", "budget", "steps"), [(ZEROED, "17MiB", 6), (DATA, "17MiB", 6), (TWICE, "12MiB", 7)]
)
def test_steps_are_planned_once_two_backwards_were_seen(
    tmp_path: Path, code: str, budget: str, steps: int
):
    """Alone they take 23.0 and 12.5 MiB; the evaluation in one of them is no part of a step."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, budget, NET + code, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert loop["models"] == ["bare parameters"]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert_within_budget(loop)
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == steps


def test_what_needs_the_call_of_a_model_is_not_offered(tmp_path: Path):
    ran = inline(tmp_path, "6MiB", NET + ZEROED)
    (loop,) = ran.loops
    assert not loop["plan"]["fits"]
    assert not [note for note in loop["notes"] if "not tried" in note]


INPUTS_TOO = """
    for step in range(8):
        x = torch.randn(2048, 128, requires_grad=True)
        (net(x) - x).square().mean().backward()
        with torch.no_grad():
            for p in weights + biases:
                p -= 0.1 * p.grad
                p.grad.zero_()
        print(repr(x.grad.sum().item()))
"""


def test_differentiated_inputs_are_no_weights(tmp_path: Path):
    """Alone it takes 22.0 MiB."""
    ran = inline(tmp_path, "19MiB", NET + INPUTS_TOO)
    (loop,) = ran.loops
    assert 16 << 20 < loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 4)


FRESH = """
    for step in range(6):
        x = torch.randn(256, 128)
        loss = (net(x) - x).square().mean()
        loss.backward()
        weights = [(w - 0.1 * w.grad).detach().requires_grad_() for w in weights]
        biases = [(b - 0.1 * b.grad).detach().requires_grad_() for b in biases]
        print(repr(loss.item()))
"""


def test_weights_that_are_others_in_each_step_are_named_at_once(tmp_path: Path):
    ran = inline(tmp_path, "17MiB", NET + FRESH)
    assert not ran.loops
    assert ran.stderr.count("is in no module, and is another tensor each time") == 1


def test_a_step_before_weights_are_known_is_told_as_such(tmp_path: Path):
    ran = inline(tmp_path, "17MiB", NET + ZEROED)
    verdict = ran.fitting["verdict"]
    assert not verdict["kept"]
    assert verdict["why"].startswith("in a step by hand, of tensors in no module")


def test_what_two_backwards_share_is_trained():
    by_hand = TrainedByHand()
    weight = torch.randn(3, requires_grad=True)
    for number in range(3):
        x = torch.randn(3, requires_grad=True)
        loss = (weight * x).sum()
        by_hand.differentiated([loss])
        assert by_hand.is_found == (number > 0)
        assert by_hand.of(x) is None
    root = by_hand.of(weight)
    assert root is not None
    assert list(root.parameters()) == [weight]
    assert by_hand.is_again([weight.sum()])
    assert not by_hand.is_again([x.sum()])


def test_what_is_trained_no_more_is_let_go():
    by_hand = TrainedByHand()
    weight, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for _ in range(2):
        by_hand.differentiated([weight.sum()])
    by_hand.differentiated([other.sum()])
    assert not by_hand.is_found
    assert by_hand.of(weight) is None
