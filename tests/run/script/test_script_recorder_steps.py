"""Steps that no plan fits and whose recording did: they go on as recorded."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ran import inline
from torch import nn

from memfit.apply.executor import Executor, Subject
from memfit.options import Options
from memfit.run.script.observed import StepRecording
from memfit.run.script.planned_step import PlannedStep
from memfit.run.script.recorder_steps import AS_RECORDED, THOUGH_A_PLAN_FITS
from memfit.run.script.request import FitRequest
from memfit.run.script.step_updates import ONE_BY_ONE, StepUpdates

SEVERAL_BACKWARDS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    stem = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)])
    heads = nn.ModuleList(nn.Linear(128, 1) for _ in range(2))

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.heads = stem, heads
        def forward(self, x):
            shared = self.stem(x)
            return [head(shared) for head in self.heads]

    model = Tasks()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        first, second = model(torch.randn(2048, 128))
        optimizer.zero_grad()
        first.square().mean().backward(retain_graph=True)
        (second - 1).square().mean().backward()
        optimizer.step()
        print(repr(first.sum().item()), repr(second.sum().item()))
    torch.save((model.state_dict(), optimizer.state_dict()), "end.pt")
"""
"""Sixteen saved tensors of 1 MiB each, which two backwards read: none of them may go."""


def test_steps_that_no_plan_fits_run_as_they_were_recorded(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "10MiB", SEVERAL_BACKWARDS, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert not loop["plan"]["fits"]
    assert loop["plan"]["minimum_peak_bytes"] > loop["plan"]["budget_bytes"]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert (loop["planned"]["steps"], loop["unplanned"]["steps"]) == (4, 0)
    # What is said of them is theirs: no step runs by the plan.
    predicted = loop["plan"]["predicted_peak_bytes"]
    assert loop["planned"]["peak_bytes"] <= predicted <= loop["plan"]["budget_bytes"]
    assert loop["plan"]["actions"] == []
    assert any("run as recorded" in note for note in loop["notes"])
    # What keeps the budget needs no other option, each of which takes a plan to be looked at.
    assert not any("would take" in it or "not tried" in it for it in loop["notes"])
    assert "it runs as it was recorded" in ran.stderr
    assert list((tmp_path / "disk").iterdir()) == []
    # The smallest budget to ask for is what that takes, though every plan takes more.
    least = loop["plan"]["minimum_budget_bytes"]
    assert least < loop["plan"]["budget_bytes"]
    other, disk = tmp_path / "again", str(tmp_path / "disk")
    other.mkdir()
    again = inline(other, str(least), SEVERAL_BACKWARDS, offload=disk)
    assert again.fitting["verdict"]["kept"], again.stderr


def test_steps_of_sizes_that_were_foreseen_run_as_the_recorded_ones(tmp_path: Path):
    code = SEVERAL_BACKWARDS.replace(
        "for step in range(6):", "for size in (2048, 1536, 1920, 1664, 1856, 1728):"
    )
    code = code.replace("torch.randn(2048,", "torch.randn(size,")
    ran = inline(tmp_path, "10MiB", code, offload="chosen")
    (loop,) = ran.loops
    assert any("foreseen" in note for note in loop["notes"]), loop["notes"]
    assert not loop["plan"]["fits"]
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_foreseen_steps_of_an_optimizer_without_state_are_planned_in_slices_too(tmp_path: Path):
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    for size in (512, 384, 480, 416):
        optimizer.zero_grad()
        loss = model(torch.randn(size, 1024)).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    ran = inline(tmp_path, "9MiB", code, offload="chosen")
    (loop,) = ran.loops
    assert ran.fitting["refusal"] is None, ran.fitting["refusal"]
    assert any("foreseen" in note for note in loop["notes"]), loop["notes"]
    assert not loop["plan"]["fits"], "so that slices are tried"
    assert loop["planned"]["steps"] == 2


def test_what_a_step_writes_over_is_what_backward_reads_as_torch_does(tmp_path: Path):
    """By `.data`, which torch does not count, by a resize, and where nothing was saved yet."""
    code = SEVERAL_BACKWARDS.replace(
        "shared = self.stem(x)",
        """shared = self.stem(x)
            fresh = torch.empty(0)
            torch.mul(shared.detach(), 2, out=fresh)
            shared = shared * fresh.add_(1)
            fresh.data.mul_(1.5)
            rows = torch.eye(8).to_sparse().mul_(2)
            shared = shared * rows.to_dense().sum()""",
    )
    ran = inline(tmp_path, "12MiB", code, offload="chosen")
    (loop,) = ran.loops
    assert any("run as recorded" in note for note in loop["notes"]), loop["notes"]
    assert loop["planned"]["steps"] == 4


def test_what_runs_as_recorded_is_not_written_down():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    batch = torch.randn(4, 8)
    expected = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
    running = StepRecording(model, batch, [], "cpu", most_bytes=0)
    loss = model(batch).sum()
    running.backward_begins()
    loss.backward()
    running.backward_ended()
    assert running.recorder.ops == []
    assert [save.allocation for save in running.recorder.saved.saves] != []
    running.abandon()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_a_script_held_to_its_budget_goes_on_where_the_recording_kept_it(tmp_path: Path):
    options = {"offload": "chosen", "fitting": ["--strict"]}
    ran = inline(tmp_path, "10MiB", SEVERAL_BACKWARDS, **options)
    assert ran.code == 0, ran.stderr


def test_without_a_place_steps_run_by_the_plan_of_least_peak(tmp_path: Path):
    ran = inline(tmp_path, "10MiB", SEVERAL_BACKWARDS)
    assert not ran.fitting["verdict"]["kept"]
    assert all("run as recorded" not in note for loop in ran.loops for note in loop["notes"])


def test_the_step_of_another_models_optimizer_updates_nothing_of_this_one():
    """As a GAN's: the discriminator steps while the generator's pass is recorded."""
    generator, discriminator = nn.Linear(8, 8), nn.Linear(8, 8)
    own = torch.optim.Adam(generator.parameters())
    other = torch.optim.Adam(discriminator.parameters())
    generator(torch.randn(2, 8)).sum().backward()
    before = generator.weight.clone()
    request = FitRequest("1GiB", Options())
    updates = StepUpdates(request, lambda: 1 << 30, lambda _: None, lambda _: None)
    executor = Executor(ONE_BY_ONE, Subject(weakref.ref(generator), own))
    running: Any = None  # is not asked for
    for listed in (other.param_groups[0]["params"], []):  # none: its updates were made already
        other.param_groups[0]["params"] = listed
        for held in (executor, None):
            assert updates.recorded_step_begins(running, generator, other, held) is held
    assert torch.equal(generator.weight, before)


def test_what_takes_more_than_its_recording_runs_by_its_plan_again():
    sizes = SimpleNamespace(predicted_peak_bytes=20)
    plan: Any = SimpleNamespace(fits=False, planned=sizes, margin_bytes=0, budget_bytes=15)
    recording: Any = None  # is not asked for
    step = PlannedStep(
        ("key",), recording, plan, 1, undoes=False, outside_bytes=0, recorded_peak_bytes=10
    )
    assert step.runs_as_recorded
    assert step.keeps_as_recorded
    assert not step.took_more(18)
    assert step.runs_as_recorded
    assert not step.keeps_as_recorded
    assert not step.took_more(21)
    assert not step.runs_as_recorded


def test_steps_that_call_more_than_the_recorded_one_run_as_recorded_once_one_was_over(
    tmp_path: Path,
):
    """A plan without actions watches nothing; a step after it may be a small one again."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    wide = lambda n: nn.Sequential(nn.Linear(64, n), nn.Tanh(), nn.Linear(n, n), nn.Linear(n, 64))
    model, other = wide(256), wide(512).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(10):
        x = torch.randn(2000, 64)
        y = model(x)
        loss = (y - x).square().mean()
        if step > 2 and step % 2:
            loss = loss + (other(y) - other(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    no_overflow = ("--forbid", "offload_parameters")
    ran = inline(tmp_path, "14MiB", code, offload="chosen", fitting=no_overflow)
    loop = ran.loops[0]
    assert loop["plan"]["fits"]
    assert any("run as recorded" in note for note in loop["notes"]), loop["notes"]


PACKED = """
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnns = nn.ModuleList(nn.GRU(32, 32) for _ in range(3))
            self.head = nn.Linear(32, 8)
        def forward(self, x, lengths):
            for rnn in self.rnns:
                packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
                x = pad_packed_sequence(rnn(packed)[0])[0]
            return self.head(x)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(10):
        lengths = torch.randint(10 + 4 * step, 14 + 4 * step, (256,))
        loss = net(torch.randn(int(lengths.max()), 256, 32), lengths).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


@pytest.mark.parametrize(("budget", "most"), [("40MiB", 4), ("24MiB", 5)])
def test_sizes_without_a_law_run_as_recorded_and_are_not_recorded_again(
    tmp_path: Path, budget: str, most: int
):
    """A packed sequence has other ops for each set of lengths; each here is longer than before."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, budget, PACKED, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert loop["observed"]["steps"] <= most
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert THOUGH_A_PLAN_FITS in loop["notes"] or AS_RECORDED in loop["notes"]


def test_a_recording_that_takes_long_is_told_of_while_it_does(tmp_path: Path):
    """Two are made here; one word is enough."""
    code = """
    import torch
    from torch import nn
    import memfit.run.script.script_recorder
    memfit.run.script.script_recorder.SLOW_SECONDS = 0

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    """
    ran = inline(tmp_path, "1GiB", code)
    said = (
        "memfit: `Sequential`: a step is recorded op by op, which takes longer than those to come"
    )
    assert ran.stderr.splitlines().count(said) == 1, ran.stderr
    (tmp_path / "again").mkdir()
    code = code.replace("SLOW_SECONDS = 0", "SLOW_SECONDS = 60")
    quiet = inline(tmp_path / "again", "1GiB", code)
    assert "op by op" not in quiet.stderr
