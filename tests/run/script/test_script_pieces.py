"""``memfit run --allow equivalent``: a model on pieces of its batch, inside its own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ran import Ran, inline

HEAD = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    rows, width = 64, 32

    def train(model, loss_of, steps=5, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(steps):
            x, y = torch.randn(rows, 3, width, width), torch.randint(0, 10, (rows,))
            optimizer.zero_grad(**options)
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.3f}")
        print(f"{sum(p.double().square().sum().item() for p in model.parameters()):.2f}")
        print(torch.rand(1).item())
"""

NET = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.conv = nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            )
            self.dropout = nn.Dropout(0.25)
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.dropout(self.conv(x).mean((2, 3))))
"""


def allowed(tmp_path: Path, budget: str, code: str, **options: Any) -> Ran:
    return inline(tmp_path, budget, code, fitting=("--allow", "equivalent"), **options)


def actions_of(loop: dict[str, Any]) -> list[str]:
    return [action["kind"] for action in loop["plan"]["actions"]]


def test_a_model_runs_on_pieces_from_the_first_step_on(tmp_path: Path):
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD
        + NET
        + """
    train(Net(), lambda model, x, y: nn.functional.cross_entropy(model(x), y))
    """,
    )
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert actions_of(loop) == ["micro_batch"]
    assert loop["plan"]["unplanned_peak_bytes"] is None
    predicted, measured = loop["plan"]["predicted_peak_bytes"], loop["planned"]["peak_bytes"]
    assert predicted - (2 << 20) <= measured <= predicted
    assert "rounding may differ" in ran.stderr
    assert "in pieces of its batch" in ran.stderr


def test_exact_plans_come_first(tmp_path: Path):
    code = (
        HEAD
        + """
    layers = [it for _ in range(8) for it in (nn.Linear(512, 512), nn.Tanh())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * width * width, 512), *layers)
    train(model, lambda model, x, y: nn.functional.cross_entropy(model(x), y))
    """
    )
    ran = allowed(tmp_path, "95%", code)
    assert "micro_batch" not in actions_of(ran.loops[0])


def test_a_model_that_mixes_items_runs_whole_and_the_reason_is_said(tmp_path: Path):
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD
        + NET.replace("nn.GroupNorm(4, 32)", "nn.BatchNorm2d(32)")
        + """
    train(Net(), lambda model, x, y: nn.functional.cross_entropy(model(x), y), steps=3)
    """,
    )
    (loop,) = ran.loops
    assert "micro_batch" not in actions_of(loop)
    (note,) = [note for note in loop["notes"] if "on pieces of its batch" in note]
    assert note.endswith("`conv.3` computes a statistic over the batch")


def test_what_a_models_code_does_outside_it_happens_as_often_as_ever(tmp_path: Path):
    """A proof would run the code once more, on fakes, and pieces many times."""
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD
        + """
    count, log = 0, open("log.txt", "w")
"""
        + NET.replace(
            "return self.head",
            """global count
            count += 1
            log.write("called")
            return self.head""",
        )
        + """
    train(Net(), lambda model, x, y: nn.functional.cross_entropy(model(x), y), steps=3)
    log.close()
    print(count)
    """,
    )
    (loop,) = ran.loops
    assert "micro_batch" not in actions_of(loop)
    assert any("`Net` uses `count`" in note for note in loop["notes"])


def test_a_model_whose_code_does_more_than_compute_runs_whole(tmp_path: Path):
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD
        + NET.replace("return self.head", "self.calls += 1\n            return self.head")
        + """
    model = Net()
    train(model, lambda model, x, y: nn.functional.cross_entropy(model(x), y), steps=3)
    print(model.calls)
    """,
    )
    (loop,) = ran.loops
    assert "micro_batch" not in actions_of(loop)
    assert any(note.endswith("`Net` sets `calls`") for note in loop["notes"])


def test_evaluations_run_on_pieces_too(tmp_path: Path):
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD.replace("rows, width = 64", "rows, width = 8")
        + NET.replace("nn.GroupNorm(4, 32)", "nn.BatchNorm2d(32)")
        + """
    model = Net()
    train(model, lambda model, x, y: nn.functional.cross_entropy(model(x), y), steps=3)
    model.eval()
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            out = model(torch.randn(64, 3, width, width))
            print(f"{out.square().sum().item():.3f}", out.is_inference(), out.requires_grad)
    """,
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr
    (loop,) = ran.loops
    assert "evaluations on pieces of their batch: 2" in loop["notes"]


def test_a_loss_inside_the_model_is_that_of_the_whole_batch(tmp_path: Path):
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD
        + NET.replace("def forward(self, x)", "def logits(self, x)")
        + """
        def forward(self, x, labels):
            logits = self.logits(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def loss_of(model, x, y):
        y[:40] = -100
        return model(x, labels=y)["loss"]

    train(Net(), loss_of)
    """,
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert actions_of(ran.loops[0]) == ["micro_batch"]


def test_gradients_kept_by_the_script_and_gradients_asked_for_on_the_way(tmp_path: Path):
    ran = allowed(
        tmp_path,
        "24MiB",
        HEAD
        + NET
        + """
    class Critic(Net): pass

    def accumulated(model, x, y):
        for part in range(2):
            loss = nn.functional.cross_entropy(model(x), y)
            if part == 0:
                loss.backward()
        return loss

    def penalised(model, x, y):
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return nn.functional.cross_entropy(out, y) + slope.square().mean()

    train(Net(), accumulated, steps=4, set_to_none=False)
    train(Critic(), penalised, steps=3)
    """,
    )
    net, critic = ran.loops
    assert actions_of(net) == ["micro_batch"]
    assert net["planned"]["peak_bytes"] <= net["plan"]["predicted_peak_bytes"] <= 24 << 20
    assert "micro_batch" not in actions_of(critic)
    assert any("asks autograd for gradients" in note for note in critic["notes"])


def test_where_results_stay_the_same_nothing_is_said_of_pieces_that_none_asked_for(tmp_path: Path):
    code = """
    def penalised(model, x, y):
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return nn.functional.cross_entropy(out, y) + slope.square().mean()

    train(Net(), penalised, steps=3)
    """
    (loop,) = inline(tmp_path, "4MiB", HEAD + NET + code).loops
    assert not loop["plan"]["fits"]
    assert not any("pieces" in note for note in loop["notes"]), "nor is it offered"


def test_the_batch_of_a_call_that_may_not_run_in_pieces_goes_with_its_step(tmp_path: Path):
    """The proof failed on fakes, and what it knew of the batch waited for the collector."""
    ran = allowed(
        tmp_path,
        "40MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(128, 192), nn.Linear(192, 12)
            self.norm = nn.BatchNorm1d(192)
        def forward(self, x, index):
            h = torch.relu(self.norm(self.first(x)))[index]
            rows = torch.arange(len(index)) % 500
            return self.last(torch.zeros(500, 192).index_add(0, rows, h))

    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    data = torch.randn(12000, 128)
    for step in range(8):
        nodes = torch.randint(0, 12000, (10000 + 37 * step,))
        index = torch.randint(0, len(nodes), (20000 + 100 * step,))
        loss = net(data[nodes], index).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    """,
        offload="chosen",
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr
    (loop,) = ran.loops
    assert loop["plan"]["fits"]


def test_more_pieces_are_tried_where_the_script_comes_to_hold_more(tmp_path: Path):
    code = """
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    held = []
    for step in range(9):
        if step == 4:
            held = [torch.zeros(1 << 20) for _ in range(2)]
        x, y = torch.randn(rows, 3, width, width), torch.randint(0, 10, (rows,))
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for one in held:
            one.add_(1.0)
        print(f"{loss.item():.3f}")
    """
    ran = allowed(tmp_path, "16MiB", HEAD + NET + code)
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert actions_of(ran.loops[0]) == ["micro_batch"]


TEACHER = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 4096), {layer}, nn.Linear(4096, 64))
    student = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    optimizer = torch.optim.SGD(student.parameters(), 0.01)
    for _ in range(5):
        x = torch.randn(512, 64)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{{loss.item():.5f}}")
"""


@pytest.mark.parametrize("layer", ["nn.GELU()", "nn.Dropout()"])
def test_a_frozen_teacher_runs_on_pieces_of_its_batch(tmp_path: Path, layer: str):
    """With the same draws where it draws: what it prints is compared with the plain script's."""
    code = TEACHER.format(layer=layer)
    ran = inline(tmp_path, "8MiB", code, fitting=("--allow", "equivalent"))
    assert ran.fitting["verdict"]["kept"] is (layer == "nn.GELU()"), ran.stderr
    (loop,) = ran.loops
    note = "forwards of models that no step trains, on pieces of their batch: 5"
    assert note in loop["notes"]


def test_a_teacher_whose_items_are_not_apart_runs_whole(tmp_path: Path):
    code = TEACHER.format(layer="nn.BatchNorm1d(4096)")
    ran = inline(tmp_path, "8MiB", code, fitting=("--allow", "equivalent"))
    assert not ran.fitting["verdict"]["kept"]
    assert not any("on pieces of their batch" in note for note in ran.loops[0]["notes"])


LATE = {
    "a hook": "{layer}.register_forward_hook(lambda m, a, o: seen.append(tuple(o.shape)))",
    "a forward": "{layer}.forward = (lambda x, f={layer}.forward: seen.append(len(x)) or f(x))",
    "a forward of the model": "{model}.forward = "
    "(lambda x, f={model}.forward: seen.append(len(x)) or f(x))",
    "a forward of a class": "type({layer}).forward = "
    "(lambda m, x, f=type({layer}).forward: seen.append(len(x)) or f(m, x))",
    "a hook on all modules": "nn.modules.module.register_module_forward_hook("
    "lambda m, a, o: seen.append(len(o)) if m is {layer} else None)",
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_what_comes_to_see_a_forward_later_sees_it_whole(tmp_path: Path, late: str):
    """A teacher's layer and one of the model that trains: what they saw is printed."""
    code = """
    seen = []
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 4096), nn.GELU(), nn.Linear(4096, 10))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(7):
        if step == 4:
            TEACHERS
            NETS
        with torch.no_grad():
            wanted = teacher(torch.randn(512, 32)).mean(0)
        x = torch.randn(rows, 3, width, width)
        loss = (net(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f}")
    print(seen)
    """
    code = code.replace("TEACHERS", late.format(layer="teacher[0]", model="teacher"))
    ran = allowed(
        tmp_path,
        "14MiB",
        HEAD + NET + code.replace("NETS", late.format(layer="net.conv[1]", model="net")),
    )
    notes = [note for loop in ran.loops for note in loop["notes"]]
    assert "forwards of models that no step trains, on pieces of their batch: 5" in notes
    assert "the batch in" in ran.stderr, "the model that trains ran on pieces at first"


@pytest.mark.parametrize("held", ["SimpleNamespace(calls=0)", "argparse.Namespace(calls=0)"])
def test_a_configuration_that_a_call_writes_to_keeps_its_batch_whole(tmp_path: Path, held: str):
    code = """
    import argparse
    from types import SimpleNamespace

    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.config = HELD

        def forward(self, x):
            config = self.config
            calls = config.calls + 1
            config.calls = calls
            return super().forward(x)

    torch.manual_seed(0)
    net = Counts()
    train(net, lambda net, x, y: nn.functional.cross_entropy(net(x), y))
    print(net.config.calls)
    """
    ran = allowed(tmp_path, "24MiB", HEAD + NET + code.replace("HELD", held))
    assert "micro_batch" not in actions_of(ran.loops[0])
