"""The optimizer of a script inside its own backward, and one parameter at a time."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from ran import in_forks, inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.run.script.adjacent import Site, adjacent_refusal, calling_site
from memfit.run.script.gradients import GradientLooks

TRAINING = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(6):
        loss = model(torch.randn(8, 512)).square().mean()
"""

AT_ONCE = """
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(repr(loss.item()))
    torch.save([model.state_dict(), optimizer.state_dict()], "end.pt")
"""


def _kinds(loop: dict[str, Any]) -> set[str]:
    return {action["kind"] for action in loop["plan"]["actions"]}


def test_updates_run_in_backward_where_the_step_follows_at_once(tmp_path: Path):
    ran = inline(tmp_path, "75%", TRAINING + AT_ONCE, fuses=True)
    (loop,) = ran.loops
    assert _kinds(loop) == {"fuse_optimizer"}
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (1, 5)
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]
    # Gradients, a third of all, are never there at once.
    assert loop["planned"]["peak_bytes"] < loop["observed"]["peak_bytes"] * 3 // 4


OTHERWISE = {
    "clipped": """
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    "something between": """
        loss.backward()
        print(repr(loss.item()))
        optimizer.step()
        optimizer.zero_grad()
    """,
    "sometimes": """
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    "twice": """
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    "looked at afterwards": """
        loss.backward()
        optimizer.step()
        print(repr(model[0][0].weight.grad.norm().item()))
        optimizer.zero_grad()
    """,
    "added up": """
        loss.backward()
        optimizer.step()
        if step == 4:
            optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    "zeros": """
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        print(repr(loss.item()))
    """,
    "in a function": """
        def update():
            optimizer.step()
        loss.backward()
        update()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_they_stay_out_of_backward_where_anything_else_may_happen(tmp_path: Path, name: str):
    """Results are those of plain Python, and gradients are there whenever the script looks."""
    (loop,) = inline(tmp_path, "70%", TRAINING + OTHERWISE[name], fuses=True).loops
    assert "fuse_optimizer" not in _kinds(loop)


BARE = """
    import torch

    torch.manual_seed(0)
    weights = [(torch.randn(128, 128) / 11).requires_grad_() for _ in range(8)]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    for step in range(5):
        x = torch.randn(2048, 128)
        h = x
        for weight in weights:
            h = torch.tanh(h @ weight) * 1.1
        loss = (h - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_gradients_of_tensors_that_are_no_parameters_stay(tmp_path: Path):
    """Torch clears them unseen: the next step was said to add to what had been let go."""
    ran = inline(tmp_path, "6MiB", BARE, fuses=True)
    (loop,) = ran.loops
    assert ran.code == 0, ran.stderr
    assert loop["planned"]["steps"] == 3
    assert "fuse_optimizer" not in _kinds(loop)


def test_a_script_that_stops_stepping_is_told(tmp_path: Path):
    """It catches the error of its own logging, which comes between backward and the step."""
    script = tmp_path / "train.py"
    code = """
    class Late(Exception):
        pass

    def later(*_):
        if step == 3:
            raise Late

    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 512)).square().mean()
        if step == 3:
            model[0][0].weight.register_hook(later)
        try:
            loss.backward()
            optimizer.step()
        except Late:
            print("skipped")
    """
    head = TRAINING[: TRAINING.index("    for step")]
    script.write_text(textwrap.dedent(head) + textwrap.dedent(code))
    command = ["-m", "memfit", "run", "--budget", "75%", "--no-offload", str(script)]
    (ran,) = in_forks([(command, tmp_path / "fit")])
    assert ran.code == 1
    assert "parameters are a step ahead" in ran.stderr
    assert "--forbid fuse_optimizer" in ran.stderr


@pytest.mark.parametrize("between", ["", "model.zero_grad()"])
def test_a_loop_that_adds_to_the_gradients_of_the_one_before_is_told(tmp_path: Path, between: str):
    """A range test of learning rates clears before each backward, the training after each step."""
    script = tmp_path / "train.py"
    code = f"""
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        optimizer.step()
    {between}
    for step in range(4):
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """
    head = TRAINING[: TRAINING.index("    for step")]
    script.write_text(textwrap.dedent(head) + textwrap.dedent(code))
    command = ["-m", "memfit", "run", "--budget", "75%", "--no-offload", str(script)]
    plain, ran = in_forks([([str(script)], tmp_path / "a"), (command, tmp_path / "fit")])
    if between:
        assert (ran.code, ran.stdout) == (0, plain.stdout)
    else:
        assert ran.code == 1
        assert ran.stdout == ""
        assert "was used and let go, and the script adds to it" in ran.stderr
        assert "--forbid fuse_optimizer" in ran.stderr


def test_another_optimizer_that_has_not_stepped_may_be_the_one_to_step(tmp_path: Path):
    """The first one lives on, and its updates ran inside backward so far."""
    code = (
        TRAINING.rstrip()
        + AT_ONCE
        + """
    first = optimizer
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for step in range(4):
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    torch.save([model.state_dict(), optimizer.state_dict()], "after.pt")
"""
    )
    ran = inline(tmp_path, "75%", code, fuses=True)
    assert "after.pt" in ran.files
    left = "the optimizer stays out of backward: there is another one, which has not stepped yet"
    assert any(left in loop["notes"] for loop in ran.loops)
    # It is planned anew before that pass, not left alone in the middle of it.
    assert "a step took more than the plan for it foresaw" not in ran.stderr


LATER = {
    "a hook on the optimizer": """
        if step == 3:
            optimizer.register_step_pre_hook(lambda *_: print("stepping"))
""",
    "a hook on all optimizers": """
        if step == 3:
            from torch.optim.optimizer import register_optimizer_step_pre_hook
            register_optimizer_step_pre_hook(lambda *_: print("stepping"))
""",
    "something compiled elsewhere": """
        if step == 3:
            compiled = torch.compile(lambda x: x.sum(), backend="eager")
            print(compiled(torch.ones(3)).item())
""",
}


@pytest.mark.parametrize("name", LATER)
def test_they_leave_backward_again_when_something_comes_that_must_see_gradients(
    tmp_path: Path, name: str
):
    body = TRAINING.rstrip().rpartition("\n")
    code = body[0] + LATER[name] + body[2] + AT_ONCE
    (loop,) = inline(tmp_path, "75%", code, fuses=True).loops
    assert loop["replans"] == 1
    assert "fuse_optimizer" not in _kinds(loop)


def test_looks_at_gradients_are_told_to_each_loop():
    """Two models trained in turn; the property goes with the last."""
    first, second = GradientLooks(), GradientLooks()
    layer = nn.Linear(2, 2)
    first.install()
    second.install()
    try:
        FakeTensorMode().from_tensor(layer.weight)  # as memfit does to know what a call takes
        assert not first.by_others
        exec(compile("layer.weight.grad", "script.py", "eval"), {"layer": layer})  # noqa: S102
        assert first.by_others
        assert second.by_others
        cleared: list[list[int]] = [[], []]
        for looks, seen in zip((first, second), cleared, strict=True):
            looks.on_clear = lambda parameter, seen=seen: seen.append(id(parameter))
        second.remove()
        layer.zero_grad()
        assert cleared == [list(map(id, layer.parameters())), []]
    finally:
        first.remove()
    assert "grad" not in vars(nn.Parameter)


def test_all_at_once_becomes_one_by_one_where_that_takes_too_much(tmp_path: Path):
    """`foreach` takes temporaries of all parameters at once, in the recorded step too."""
    code = TRAINING.replace(
        "SGD(model.parameters(), 0.1, momentum=0.9)", "AdamW(model.parameters(), foreach=True)"
    )
    between = AT_ONCE.replace(
        "        optimizer.step()", "        print('between')\n        optimizer.step()"
    )
    ran = inline(tmp_path, "26MiB", code + between, fuses=True)
    (loop,) = ran.loops
    assert _kinds(loop) == {"one_by_one"}
    assert ran.fitting["verdict"]["kept"]


NOTES = """
def backward(): found["backward"] = calling_site()
def step(): found["step"] = calling_site()
def other(): return 1
"""


def _sites(code: str) -> tuple[Site | None, Site | None]:
    """Where a piece of code calls `backward` and `step`, which look like code of memfit."""
    names: dict[str, Any] = {"found": {}, "calling_site": calling_site}
    inside = str(Path(memfit.__file__).parent / "notes.py")
    exec(compile(NOTES, inside, "exec"), names)  # noqa: S102
    exec(compile(code, "script.py", "exec"), names)  # noqa: S102
    return names["found"].get("backward"), names["found"].get("step")


CODE = {
    "backward()\nstep()": "",
    "loss = 1\nbackward()\nx = loss\nstep()": "something runs",
    "backward()\nother()\nstep()": "something runs",
    "for i in (1, 2):\n    backward()\n    step()": "",
    "step()\nbackward()": "not called after",
    "backward()\nif other():\n    step()": "something runs",
    "def f():\n    step()\nbackward()\nf()": "different functions",
}


@pytest.mark.parametrize("code", CODE)
def test_calls_are_adjacent_where_nothing_can_come_between(code: str):
    refusal = adjacent_refusal(*_sites(code))
    assert (refusal == "") == (CODE[code] == "")
    assert CODE[code] in refusal


IN_HOOKS = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
            self.second = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
            self.heads = nn.ModuleList(nn.Linear(128, 10) for _ in range(2))
        def forward(self, x):
            made = []
            for layer in self.first:
                x = torch.tanh(layer(x)) * 1.1
                made.append(x.detach())
            y = 0
            for layer, it in zip(self.second, made):
                y = torch.tanh(layer(it) * it + y)
            return self.heads[0](x) + self.heads[1](y)

    model = Net()
    HOOK
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(6):
        x, y = torch.randn(2048, 128), torch.randint(0, 10, (2048,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        print(repr(loss.item()))
    print(repr(sum(p.double().sum().item() for p in model.parameters())))
"""
"""What the second half reads was made by the first, whose weights may have been updated by then."""

HOOKS = {
    # As torch's tutorial on freeing gradients has it.
    "one for each parameter": """
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}
    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
""",
    "one in the last hook": """
    optimizer, ready = torch.optim.AdamW(model.parameters()), []
    def step(parameter):
        ready.append(parameter)
        if len(ready) == len(list(model.parameters())):
            optimizer.step()
            optimizer.zero_grad()
            ready.clear()
""",
    "none": """
    def step(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None
""",
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("budget", ["17.5MiB", "13.5MiB"])
def test_optimizers_that_step_in_hooks_of_backward_keep_the_budget(
    tmp_path: Path, hook: str, budget: str
):
    """They take 23.0 to 24.5 MiB alone; what a hook has updated, nothing is computed from again."""
    (tmp_path / "disk").mkdir()
    code = IN_HOOKS.replace("    HOOK\n", HOOKS[hook].removeprefix("\n"))
    ran = inline(tmp_path, budget, code, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 3
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert not any("dispatch mode" in note for note in loop["notes"])
