"""Steps that begin with the use of a parameter: no module's call comes first, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ran import assert_within_budget, inline
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode

from memfit.run.script.parameter_uses import ParameterUses

BARE = """
    import torch

    torch.manual_seed(0)
    weights = [(torch.randn(128, 128) / 11).requires_grad_() for _ in range(8)]
    biases = [torch.zeros(128, requires_grad=True) for _ in range(8)]
    optimizer = torch.optim.Adam([*weights, *biases], lr=1e-3)

    def net(x):
        for weight, bias in zip(weights, biases):
            x = torch.tanh(x @ weight + bias) * 1.1
        return x

    for step in range(6):
        x = torch.randn(2048, 128)
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""

OWN_METHODS = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(128, 128) / 11 for _ in range(8))
            self.head = nn.Linear(128, 10)
        def features(self, x):
            for weight in self.weights:
                x = torch.tanh(x @ weight) * 1.1
            return x
        def loss(self, x, y):
            return nn.functional.cross_entropy(self.head(self.features(x)), y)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        loss = model.loss(torch.randn(2048, 128), torch.randint(0, 10, (2048,)))
        optimizer.zero_grad()
        loss.backward()
        if step % 2:
            print(model.weights[0].norm().item())
        optimizer.step()
        print(repr(loss.item()))
"""


@pytest.mark.parametrize(("code", "name"), [(BARE, "bare parameters"), (OWN_METHODS, "Net")])
@pytest.mark.parametrize("budget", ["17MiB", "13MiB"])
def test_what_calls_no_module_first_is_planned(tmp_path: Path, code: str, name: str, budget: str):
    """Alone it takes 22.5 and 19.3 MiB."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, budget, code, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert loop["models"] == [name]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert loop["divergence"] is None
    assert_within_budget(loop)
    assert loop["planned"]["steps"] >= 3
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == 6


def test_offloaded_parameters_that_no_call_uses_go_again(tmp_path: Path):
    """Half a MiB of weights is left in memory where each stays that a step uses."""
    (tmp_path / "disk").mkdir()
    forbid = ["--forbid", "offload", "--forbid", "offload_optimizer"]
    ran = inline(tmp_path, "10.3MiB", OWN_METHODS, offload=str(tmp_path / "disk"), fitting=forbid)
    (loop,) = ran.loops
    counts = {action["kind"]: action["count"] for action in loop["plan"]["actions"]}
    assert counts["offload_parameters"] == 8
    assert_within_budget(loop)


GRADIENT_ACCUMULATED = """
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            x = torch.randn(1024, 128)
            loss = (net(x) - x).square().mean()
            loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_accumulated_gradients_take_a_pass_each(tmp_path: Path):
    code = BARE.partition("    for step in range(6)")[0] + GRADIENT_ACCUMULATED
    ran = inline(tmp_path, "8MiB", code)
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert loop["unplanned"]["steps"] == 0


def seen(idle: Callable[[], bool] = lambda: True) -> tuple[ParameterUses, list[Any]]:
    found: list[Any] = []
    uses = ParameterUses(
        idle,
        lambda used, _op, _given: found.append(used),
        lambda size_bytes, makes: found.append((size_bytes, makes)),
    )
    return uses, found


def test_nothing_is_seen_of_what_is_done_aside():
    uses, found = seen()
    weight = torch.randn(4, 4, requires_grad=True)
    uses.watch()
    try:
        with uses.aside():
            assert not _len_torch_function_stack()
            weight @ weight
            with uses.aside():
                weight @ weight
        assert not found
        weight @ weight
        assert found
        found.clear()
        with TorchFunctionMode():
            height = _len_torch_function_stack()
            with uses.aside():  # what lies above stays where it is
                assert _len_torch_function_stack() == height
    finally:
        uses.leave()
    assert not _len_torch_function_stack()


def test_what_is_left_while_aside_does_not_come_back():
    uses, found = seen()
    uses.watch()
    with uses.aside():
        uses.leave()  # as where something compiled begins to run
    height = _len_torch_function_stack()
    uses.leave()
    assert not height
    with uses.aside():
        uses.watch()
    assert _len_torch_function_stack() == 1
    uses.leave()
    assert not _len_torch_function_stack()
    assert not found


def test_a_use_is_seen_before_it_runs_and_a_look_is_none():
    uses, found = seen()
    weight = torch.randn(4, 4, requires_grad=True)
    uses.watch()
    try:
        assert weight.shape == (4, 4)
        assert weight.grad is None
        weight.detach().add_(1)
        torch.randn(4) * 2
        assert not found
        weight.norm()
        nn.init.normal_(weight.detach())
        nn.Linear(4, 4)
        assert not found
        torch.cat([torch.ones(1, 4), weight])
        assert found[0] is weight
        torch.ones(1, 4) @ weight.T
        assert found[1] is weight
    finally:
        uses.leave()
    weight * 2
    assert len(found) == 2
    assert _len_torch_function_stack() == 0


def test_a_use_without_gradients_is_told_too():
    """An evaluation begins with it, and ends the step of a script that has no optimizer."""
    uses, found = seen()
    weight = torch.randn(4, 4, requires_grad=True)
    uses.watch()
    try:
        with torch.no_grad():
            weight * 2
    finally:
        uses.leave()
    assert found[0] is weight


def test_nothing_is_seen_in_a_forward():
    uses, found = seen(lambda: False)
    uses.watch()
    try:
        nn.Linear(2, 2)(torch.randn(2, 2))
    finally:
        uses.leave()
    assert not found


class Counts(TorchFunctionMode):
    """A mode of the script's."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_script_leave_as_they_came():
    uses, found = seen()
    with Counts() as outer:
        uses.watch()  # under another mode nothing is watched: that one takes off the last
        outer_count = outer.count
        torch.ones(2, requires_grad=True) * 2
        assert outer.count > outer_count
    assert not found
    assert _len_torch_function_stack() == 0
    uses.watch()
    with Counts():
        uses.leave()
    assert _len_torch_function_stack() == 1, "it lay below one of the script's"
    torch.ones(2, requires_grad=True) * 2
    assert not found
    uses.watch()
    weight: Tensor = torch.ones(2, requires_grad=True)
    weight * 2
    assert found == [weight] or found[0] is weight
    uses.leave()
    assert _len_torch_function_stack() == 0


LEAVES = """
    import torch
    from torch import nn

    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        print(torch._C._len_torch_function_stack())
        model(torch.randn(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_steps_that_begin_with_calls_are_not_watched_for_long(tmp_path: Path):
    script = tmp_path / "train.py"
    ran = inline(
        tmp_path, "1GiB", LEAVES.replace("print(", "(lambda it: it and step and exit(3))(")
    )
    assert script.exists()
    assert ran.code == 0


def test_what_is_about_to_be_taken_is_told_also_where_no_use_begins_a_step():
    uses, found = seen()
    weight = torch.randn(1024, 1024, requires_grad=True)
    uses.watch(begin=False)
    try:
        weight.detach().double()
        weight * 2.0
        uses.watch()
        weight.detach().clone()
    finally:
        uses.leave()
    assert found == [(8 << 20, False), (4 << 20, True)]


def test_warnings_of_torch_are_told_of_the_line_that_calls(tmp_path: Path):
    """Plain Python tells of two lines, each once."""
    code = """
    import sys, torch
    from torch import nn

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        data = torch.tensor(torch.ones(2, 4))
        loss = model(data).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = torch.tensor(loss.detach())
    """
    ran = inline(tmp_path, "1GiB", code)
    told = [line for line in ran.stderr.splitlines() if "UserWarning: To copy" in line]
    assert len(told) == 2
    assert not any("memfit" in line.partition("UserWarning")[0] for line in told)
