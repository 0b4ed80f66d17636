"""Gradients in files between steps: as they were wherever anybody looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ran import inline
from torch import nn

from memfit import _native
from memfit.options import Options
from memfit.run.script import gradients_between
from memfit.run.script.gradients_between import (
    GRADIENTS_IN_FILES,
    STATE_IN_FILES,
    GradientsBetween,
)
from memfit.run.script.request import FitRequest
from memfit.run.script.saved_state import SAVED_IN_FILES
from memfit.track import cpu

MIB = 1 << 20

SAVES = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.rand(2048, 512)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(data[:64] + step).square().mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
        copies = [copy.deepcopy(model.state_dict()) for _ in range(2)]
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        del copies
        print(repr(loss.item()), repr(total.item()))
    torch.save(model.state_dict(), "end.pt")
"""


def test_what_runs_between_steps_finds_room_and_gradients(tmp_path: Path):
    """6 MiB of weights, as much of gradients, and between steps two copies of the weights."""
    ran = inline(tmp_path, "20MiB", SAVES, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr


LOOKS_WITH_GRADIENTS_ON = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    table = nn.Embedding(8192, 256)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for epoch in range(4):
        table.train()
        for step in range(3):
            loss = table(torch.randint(8192, (256,))).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
        table.eval()
        rows = torch.randint(8192, (8192,))
        print(repr((table(rows) + table(rows.flip(0))).sum().item()))
"""


def test_gradients_wait_while_a_model_is_tried_with_gradients_on(tmp_path: Path):
    """8 MiB of weights, as much of gradients, and three tensors of that size in between.

    Two such calls were recorded; the third ran by the plan of a training step.
    """
    ran = inline(tmp_path, "36MiB", LOOKS_WITH_GRADIENTS_ON, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr


SUMS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(torch.randn(512, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    print(sum(p.detach().double().abs().sum().item() for p in model.parameters()).hex())
    print(sum(p.grad.double().square().sum().item() for p in model.parameters()).hex())
"""


def test_weights_looked_at_after_training_find_room(tmp_path: Path):
    """8 MiB of weights and as much of gradients; a weight of 4 MiB is looked at in two of 8."""
    ran = inline(tmp_path, "25MiB", SUMS, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr


ROWS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    table = nn.EmbeddingBag(20000, 64, mode="sum", sparse=True)
    model = nn.Sequential(table, nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = model(torch.randint(20000, (2048, 8))).square().mean()
        if step % 3:  # else added to the gradient of the step before
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        print(repr(loss.item()), total.hex())
    print(table.weight.grad.coalesce().values().double().sum().item().hex())
"""


def test_rows_of_sparse_gradients_wait_in_files_too(tmp_path: Path):
    """4.9 MiB of weights and 4 of rows, which twice the weights in two types find no room with."""
    ran = inline(tmp_path, "26MiB", ROWS, offload="chosen")
    assert GRADIENTS_IN_FILES in ran.loops[0]["notes"], ran.stderr
    assert ran.fitting["verdict"]["kept"], ran.stderr


@pytest.fixture(autouse=True)
def worth_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets here are of what is live, and other tests may have left tensors."""
    monkeypatch.setattr(gradients_between, "_WORTH", 0)


def trained() -> nn.Linear:
    model = nn.Linear(512, 512)
    model(torch.randn(4, 512)).sum().backward()
    return model


def between(tmp_path: Path) -> GradientsBetween:
    assert cpu.start() is None
    return GradientsBetween(FitRequest("8MiB", Options(offload=str(tmp_path))))


def is_mapped(model: nn.Linear) -> bool:
    assert model.weight.grad is not None
    return not _native.is_counted(model.weight.grad.data_ptr())


def room(more: int) -> int:
    """A budget with so much room above what is live."""
    return _native.counted_bytes() + more


def test_gradients_wait_in_files_until_backward(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    assert gradients.begins("step", room(0), [model]) == str(tmp_path)
    assert is_mapped(model)
    gradients.pass_begins()
    assert is_mapped(model), "nobody has written to it"
    assert torch.equal(model.weight.grad, expected)
    gradients.backward_begins(None)
    assert not is_mapped(model)
    assert torch.equal(model.weight.grad, expected)


def test_the_rows_of_a_sparse_gradient_go_unless_others_see_them(tmp_path: Path):
    gradients = between(tmp_path)
    models = [nn.Embedding(5000, 64, sparse=True) for _ in range(2)]
    rows = torch.arange(4000) % 1500
    for model in models:
        model(rows).square().sum().backward()
    gone, seen = (model.weight.grad for model in models)
    assert gone is not None
    assert seen is not None
    before, values = gone.to_dense(), seen._values()
    assert gradients.go(room(0), models)
    assert not _native.is_counted(gone._values().data_ptr())
    assert _native.is_counted(values.data_ptr())
    assert models[0].weight.grad is gone
    assert torch.equal(gone.to_dense(), before)
    gradients.backward_begins(None)
    models[0](rows).square().sum().backward()
    assert torch.equal(models[0].weight.grad.to_dense(), before + before)


def test_gradients_that_dlpack_lends_stay_where_they_are(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    assert model.weight.grad is not None
    array = np.from_dlpack(model.weight.grad)
    gradients.begins("step", room(0), [model])
    model.weight.grad[0, 0] = 7
    assert array[0, 0] == 7
    del array
    gradients.pass_begins()
    gradients.begins("step", room(-1), [model])
    assert is_mapped(model)
    array = np.from_dlpack(model.weight.grad)
    gradients.backward_begins(None)
    model.weight.grad[0, 0] = 8
    assert array[0, 0] == 8


def test_gradients_that_were_written_have_memory_when_a_pass_begins(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    assert model.weight.grad is not None
    expected = model.weight.grad * 2
    gradients.begins("step", room(0), [model])
    model.weight.grad.mul_(2)
    gradients.pass_begins()
    assert not is_mapped(model)
    assert torch.equal(model.weight.grad, expected)


def test_gradients_that_were_dropped_are_not_fetched(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    gradients.begins("step", room(0), [model])
    gradients.pass_begins()
    model.zero_grad()
    window = _native.AllocationWindow()
    before = _native.counted_bytes()
    gradients.backward_begins(None)
    assert window.peak()[0] == before


def test_gradients_stay_once_it_is_known_that_there_is_room(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    gradients.begins("step", room(MIB), [model])
    assert is_mapped(model), "nobody knows what comes"
    gradients.pass_begins()
    gradients.backward_begins(None)
    gradients.begins("step", room(MIB), [model])
    assert not is_mapped(model)


def test_what_comes_seldom_is_known_by_itself(tmp_path: Path):
    """An evaluation that took 4 MiB once lacks room again; steps without one do not."""
    gradients, model = between(tmp_path), trained()

    def step(*, evaluates: bool) -> tuple[bool, bool]:
        gradients.begins("step", room(MIB), [model])
        after_step = is_mapped(model)
        if evaluates:
            gradients.begins("evaluation", room(MIB), [model])
            torch.empty(MIB)
        in_evaluation = is_mapped(model)
        gradients.pass_begins()
        gradients.backward_begins(None)
        return after_step, in_evaluation

    step(evaluates=False)
    step(evaluates=True)
    assert step(evaluates=False) == (False, False)
    assert step(evaluates=True) == (False, True)


def test_parameters_that_were_elsewhere_in_between_are_needed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They come home before the next pass, and begin the next evaluation in memory."""
    gradients, model = between(tmp_path), trained()
    elsewhere = [0]
    monkeypatch.setattr(gradients_between, "parameters_elsewhere", lambda: elsewhere[0])
    mapped = []
    for _ in range(2):
        gradients.begins("step", room(1 << 40), [model])
        gradients.begins("evaluation", room(1 << 40) if not mapped else room(2 * MIB), [model])
        mapped.append(is_mapped(model))
        elsewhere[0] = 3 * MIB
        gradients.parameters_went()
        elsewhere[0] = 0
        gradients.pass_begins()
        gradients.backward_begins(None)
    assert mapped == [False, True]


def test_room_that_is_known_to_be_needed_is_made(tmp_path: Path):
    gradients, model = between(tmp_path), trained()
    for least, expected in ((0, True), (0, False), (2 * MIB, True)):
        gradients.begins("step", room(1 << 40), [model])
        assert not is_mapped(model)
        budget = room(MIB)
        gradients.begins("saving", budget, [model], least_bytes=least)
        assert is_mapped(model) == expected
        gradients.pass_begins()
        gradients.backward_begins(None)


@pytest.mark.parametrize("seen", ["view", "array", "array of a mapped one"])
def test_what_others_see_of_a_gradient_is_the_gradient(tmp_path: Path, seen: str):
    gradients, model = between(tmp_path), trained()
    assert model.weight.grad is not None
    if seen == "view":
        look = model.weight.grad[0]
    elif seen == "array":
        look = model.weight.grad.numpy()[0]
    gradients.begins("step", room(0), [model])
    assert is_mapped(model) == (seen == "array of a mapped one")
    if seen == "array of a mapped one":
        look = model.weight.grad.numpy()[0]
    gradients.pass_begins()
    gradients.backward_begins(None)
    model.weight.grad.fill_(3)
    assert (look == 3).all()


EPOCHS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.{optimizer}
    zero = optimizer.zero_grad
    for epoch in range(2):
        for step in range(4):
            loss = model(torch.randn(8, 512)).square().mean()
            {between}
            loss.backward()
            {after}
            optimizer.step()
            print(repr(loss.item()), repr(sum(p.double().sum().item() for p in model.parameters())))
        {epoch}
"""
SGD = "SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)"
SAVE = """with torch.no_grad():
            print(repr(model(torch.randn(8, 512)).sum().item()))
        torch.save([model.state_dict(), optimizer.state_dict()], "epoch.pt")"""
WAYS = {
    "dropped": ("optimizer.zero_grad()", ""),
    "zeroed": ("optimizer.zero_grad(set_to_none=False)", ""),
    "clipped": (
        "optimizer.zero_grad()",
        "print(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())",
    ),
    "accumulated": ("optimizer.zero_grad() if step % 2 == 0 else None", ""),
    "looked at": (
        "print([p.grad.sum().item() for p in model.parameters() if p.grad is not None]); zero()",
        "print(model[3].weight.grad.sum().item()); model[3].weight.grad *= 2",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_script(tmp_path: Path, way: str):
    """8 MiB of parameters, as much of gradients and of momentum."""
    first, then = WAYS[way]
    code = EPOCHS.format(optimizer=SGD, between=first, after=then, epoch=SAVE)
    folder = tmp_path / "files"
    folder.mkdir()
    ran = inline(tmp_path, "18MiB", code, offload=str(folder))
    (loop,) = ran.loops
    assert GRADIENTS_IN_FILES in loop["notes"]


def test_a_script_that_saves_its_optimizer_once_an_epoch_keeps_its_budget(tmp_path: Path):
    """All parameters with all gradients are 16 MiB, and a step is planned for less."""
    code = EPOCHS.format(optimizer=SGD, between="optimizer.zero_grad()", after="", epoch=SAVE)
    folder = tmp_path / "files"
    folder.mkdir()
    ran = inline(tmp_path, "15MiB", code, offload=str(folder))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert SAVED_IN_FILES in ran.loops[0]["notes"]
    assert ran.loops[0]["observed"]["peak_bytes"] < 14 * MIB


def test_a_checkpoint_that_lives_on_is_in_files_where_the_next_step_has_no_room(tmp_path: Path):
    """There is room for the copies when they are made: 8 MiB beside 8 MiB of parameters."""
    kept = """
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, "epoch.pt")"""
    code = EPOCHS.format(optimizer=SGD, between="optimizer.zero_grad()", after="", epoch=kept)
    folder = tmp_path / "files"
    folder.mkdir()
    ran = inline(tmp_path, "18MiB", code, offload=str(folder))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert SAVED_IN_FILES in ran.loops[0]["notes"]


def test_a_plan_counts_on_gradients_in_files(tmp_path: Path):
    """Forward takes 8 MiB at once, beside 8 MiB of gradients that the script drops after it."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])

        def forward(self, x):
            with torch.no_grad():
                noise = torch.randn(4096, 512).mean()
            return self.layers(x + noise)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(torch.randn(8, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    folder = tmp_path / "files"
    folder.mkdir()
    ran = inline(tmp_path, "17MiB", code, offload=str(folder))
    (loop,) = ran.loops
    assert loop["plan"]["fits"]
    assert loop["planned"]["steps"] == 3
    assert ran.fitting["verdict"]["kept"], ran.stderr


AVERAGES = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(5):
        x = torch.randn(512, 512)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        olds = [p.data * 0.9 for p in average.parameters()]
        news = [p.data * 0.1 for p in model.parameters()]
        for p, old, new in zip(average.parameters(), olds, news):
            p.data = old.add_(new)
        del olds, news, old, new
        print(repr(loss.item()), optimizer.state[model[0].weight]["step"].item())
    print([repr(p.sum().item()) for p in average.parameters()])
    torch.save([model.state_dict(), optimizer.state_dict()], "end.pt")
"""


SINES = AVERAGES.replace(
    "nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])",
    "nn.Sequential(*[it for _ in range(8) for it in (nn.Linear(512, 512), Sine())])",
).replace(
    "    model =",
    """    class Sine(nn.Module):
        def forward(self, x):
            return x.sin()
    model =""",
)
"""A step takes 60 MiB, 8 of which are sines: to compute them again takes less than any file."""


@pytest.mark.parametrize(
    ("code", "budget", "chooses"),
    [(AVERAGES, "50MiB", False), (AVERAGES, "44MiB", True), (SINES, "52MiB", False)],
    ids=["as it is", "by times", "recomputed"],
)
def test_state_leaves_room_for_what_runs_between_steps(
    tmp_path: Path, code: str, budget: str, *, chooses: bool
):
    """32 MiB of weights, their average and state, which two copies join that no step has.

    A step takes 51 MiB, and less without what its backward can compute again. At 44 MiB measured
    times choose between that and the state.
    """
    folder = tmp_path / "files"
    folder.mkdir()
    ran = inline(tmp_path, budget, code, offload=str(folder))
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert STATE_IN_FILES in loop["notes"], ran.stderr
    assert list(folder.iterdir()) == []
    kinds = {action["kind"] for action in loop["plan"]["actions"]}
    assert chooses or "offload_optimizer" not in kinds, "between steps alone"
