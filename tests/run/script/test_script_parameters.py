"""Scripts whose parameters are elsewhere but for a room: same results in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ran import Ran, assert_within_budget, inline
from test_script_updates import MIB, STATEFUL
from torch import nn

from memfit.run.script.gradients_between import GRADIENTS_IN_FILES
from memfit.run.script.recorder_steps import AS_RECORDED
from memfit.tensors.storage import viewed

pytestmark = pytest.mark.offloads_parameters

DEEP = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
"""

SGD = (
    DEEP
    + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
"""
)


def offloaded(tmp_path: Path, code: str, budget: str = "15MiB", **options: Any) -> Ran:
    """A script that ran with a disk, which is empty after it."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, budget, code, offload=str(tmp_path / "disk"), **options)
    assert list((tmp_path / "disk").iterdir()) == []
    return ran


def parameters_away(ran: Ran) -> int:
    (loop,) = ran.loops
    counts = {action["kind"]: action["count"] for action in loop["plan"]["actions"]}
    return int(counts.get("offload_parameters", 0))


def test_a_script_trains_in_less_than_its_parameters_and_gradients(tmp_path: Path):
    """8 MiB of each; between steps the script clips, saves and loads its optimizer's state."""
    ran = offloaded(tmp_path, STATEFUL)
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert parameters_away(ran) == 8
    assert "8 parameters offloaded; at most" in ran.stderr
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (1, 5)
    assert loop["plan"]["predicted_peak_bytes"] - loop["planned"]["peak_bytes"] <= 2 * MIB


WEIGHED = (
    DEEP
    + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        norms = [p.norm().item() for p in model.parameters()]
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
            total = sum(p.sum() for p in model.parameters())
        print(repr(loss.item()), repr(sum(norms)), repr(total.item()))
        optimizer.zero_grad()
"""
)


def test_parameters_looked_at_one_after_another_go_again(tmp_path: Path):
    """8 MiB of each; their norms are taken beside gradients, and they decay after the step."""
    ran = offloaded(tmp_path, WEIGHED, "13MiB")
    assert parameters_away(ran) == 8
    assert ran.fitting["verdict"]["kept"], ran.stderr


EVALUATED = (
    DEEP
    + """
    kept = [model[2].weight.data, model[5].weight.t()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(8):
        for part in range(2):
            loss = model(torch.randn(16, 512)).square().mean()
            loss.backward()
            for a in average:
                a.mul_(1.01)  # it is written in all passes: it stays in memory
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if step == 3:
                for p, a in zip(model.parameters(), average):
                    a.lerp_(p, 0.1)
                    p.mul_(1.01)
            if step % 2:
                print(model(torch.ones(2, 512)).sum().item())
        print(repr(loss.item()), [k.sum().item() for k in kept])
    model(torch.randn(16, 512))  # a pass that goes no further
    print(float(model[0].weight.detach().numpy().sum()))
    torch.save((model.state_dict(), average), "end.pt")
"""
)


def test_a_script_evaluates_averages_and_changes_parameters_between_steps(tmp_path: Path):
    """What it keeps a view of stays in memory: six of eight matrices go."""
    ran = offloaded(tmp_path, EVALUATED, "22MiB")
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert parameters_away(ran) == 6
    assert loop["planned"]["steps"] >= 6


def test_a_view_that_is_taken_later_has_something_behind_it(tmp_path: Path):
    ran = offloaded(
        tmp_path,
        SGD
        + """
    for step in range(6):
        train()
        if step == 2:
            kept = [p.data for p in model.parameters()]
        if step > 2:
            print(sum(view.sum().item() for view in kept))
    """,
    )
    (loop,) = ran.loops
    assert "8 parameters offloaded" in ran.stderr
    assert parameters_away(ran) == 0
    view = (
        "parameters stay in memory: a view of `0.weight` lives on, in a variable or in the graph "
        "of a value that the script keeps"
    )
    assert loop["notes"] == [GRADIENTS_IN_FILES, view, AS_RECORDED]
    assert loop["planned"]["steps"] == 5


def test_a_graph_that_outlives_its_step_finds_its_parameters(tmp_path: Path):
    """Weights are frozen, so the script may go back through them after its optimizer stepped.

    Not in the first step: views that are kept there are kept in all.
    """
    ran = offloaded(
        tmp_path,
        DEEP
        + """
    for layer in model:
        layer.weight.requires_grad_(False)
    biases = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(biases, lr=0.1)
    for step in range(5):
        output = model(torch.randn(16, 512))
        output.mean().backward(retain_graph=step > 0)
        optimizer.step()
        if step > 0:
            output.square().mean().backward()
        print(repr(output.sum().item()), sum(p.grad.sum().item() for p in biases))
        del output
        optimizer.zero_grad()
    torch.save(model.state_dict(), "end.pt")
    """,
        "6MiB",
        fitting=("--forbid", "offload"),  # else they are read from files all the time
    )
    assert parameters_away(ran) == 8
    assert ran.loops[0]["planned"]["steps"] >= 3


def test_a_script_that_is_left_alone_midway_has_its_parameters_back(tmp_path: Path):
    ran = offloaded(
        tmp_path,
        DEEP
        + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = torch.compile(lambda loss: loss * 0.5, backend="eager")
    for step in range(5):
        loss = model(torch.randn(16, 512)).square().mean()
        if step == 3:
            loss = half(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "end.pt")
    """,
    )
    assert parameters_away(ran) == 8
    (loop,) = ran.loops
    assert loop["refusal"]
    assert loop["planned"]["steps"] == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_model_that_is_traced_has_its_parameters_back_and_goes_on(tmp_path: Path):
    """TorchScript reads parameters where no call of a module tells of it."""
    ran = offloaded(
        tmp_path,
        DEEP
        + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 512)
    for step in range(8):
        if step == 4:
            with torch.no_grad():
                print(repr(model(x).sum().item()))
                traced = torch.jit.trace(model, x)
                print(repr(traced(x).sum().item()))
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    with torch.no_grad():
        print(repr(traced(x).sum().item()))
    torch.save(model.state_dict(), "end.pt")
    """,
    )
    assert parameters_away(ran) == 8
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 6


def test_a_script_that_updates_by_hand_keeps_its_parameters(tmp_path: Path):
    ran = offloaded(
        tmp_path,
        DEEP
        + """
    for step in range(4):
        model.zero_grad()
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        print(repr(loss.item()))
    """,
    )
    assert parameters_away(ran) == 0


PENALISED = (
    DEEP
    + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    head = model[-1].weight
    for step in range(8):
        out = model(torch.randn(16, 512)) @ head.T
        if step == 6:
            torch.save(model.state_dict(), "between.pt")
            print(float(head.detach().numpy().sum()), model[0].weight.data.tolist()[0][:2])
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        loss = out.square().mean() + 1e-4 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""
)


def test_what_a_step_computes_with_parameters_outside_of_calls_is_held_to_the_plan(tmp_path: Path):
    """A penalty on all weights, by hand: 18.5 MiB if each stayed that it uses, as planned 15.6."""
    ran = offloaded(tmp_path, PENALISED.replace("step == 6", "step == 99"), "16MiB")
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert parameters_away(ran) == 8
    assert loop["planned"]["steps"] == 6


def test_what_a_step_gives_away_before_backward_is_whole(tmp_path: Path):
    """Saved, as an array and as a list: all of it is compared with a run without a plan."""
    ran = offloaded(tmp_path, PENALISED, "16MiB")
    assert parameters_away(ran) == 8
    assert ran.files["between.pt"]


def test_where_parameters_cannot_be_written_the_script_goes_on_unplanned(tmp_path: Path):
    """The disk is full from the third step on: those that are there come back."""
    ran = offloaded(
        tmp_path,
        SGD
        + """
    from memfit.apply.offload.tiers import DiskTier
    from memfit.errors import OffloadError
    send = DiskTier.send
    def full(tier, tensor):
        raise OffloadError("No space left on device")
    for step in range(6):
        if step == 2:
            DiskTier.send = full
        train()
    torch.save(model.state_dict(), "end.pt")
    """,
    )
    assert parameters_away(ran) == 8
    (loop,) = ran.loops
    assert "parameters cannot be offloaded" in loop["refusal"]
    assert loop["unplanned"]["steps"] == 3


@pytest.mark.parametrize("keeps", ["nothing", "a list", "the gradient", "data", "a transpose"])
def test_views_that_are_kept_are_seen(keeps: str):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bias = model[0].bias
    model[1].weight = nn.Parameter(model[0].weight.detach())
    weight = model[0].weight
    model(torch.ones(2, 8)).sum().backward()
    kept = {
        "nothing": lambda: None,
        "a list": lambda: [weight],
        "the gradient": lambda: weight.grad,
        "data": lambda: weight.data,
        "a transpose": weight.t,
    }[keeps]()
    found = viewed(model.parameters())
    assert len(found) == (2 if keeps in ("data", "a transpose") else 0)
    del kept
    assert viewed(model.parameters()) == []
