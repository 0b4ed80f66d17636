"""Optimizers that are not torch's own: their state, and steps of which a part is in memory."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from ran import inline

NET = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(*[it for _ in range(10) for it in (nn.Linear(512, 512), nn.Tanh())])
"""
"""Parameters take 10 MiB, as do gradients, and what forward keeps takes 2.6."""

TRAIN = """
    for step in range(6):
        x = torch.randn(64, 512)
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    torch.save([list(net.parameters()), optimizer.state_dict()], "trained.pt")
"""

LION = """
    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, dict(lr=1e-4))
        @torch.no_grad()
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    gradient, state = p.grad.data, self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p.data)
                        state["square"] = torch.zeros_like(p)
                    p.data.mul_(0.999)
                    p.data.add_(state["mean"].lerp(gradient, 0.1).sign_(), alpha=-group["lr"])
                    state["mean"].lerp_(gradient, 0.01)
                    state["square"].add_(gradient.square())
            return loss
    optimizer = Lion(net.parameters())
"""

OWN = """
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, dict(lr=1e-3))
            self.moments, self.slow = {}, []
        @torch.no_grad()
        def step(self):
            listed = self.param_groups[0]["params"]
            norm = torch.sqrt(sum(p.grad.square().sum() for p in listed))
            for number, p in enumerate(listed):
                if p not in self.moments:
                    self.moments[p] = torch.zeros_like(p)
                    self.slow.append(p.detach().clone())
                p.sub_(self.moments[p].mul_(0.9).add_(p.grad / norm), alpha=1e-3)
                self.slow[number].lerp_(p, 0.1)
    optimizer = Own(net.parameters())
"""

LIBRARIES = {
    "Lamb of timm": "from timm.optim import Lamb; optimizer = Lamb(net.parameters())",
    "Lion of timm": "from timm.optim import Lion; optimizer = Lion(net.parameters(), foreach=True)",
    "Adafactor of transformers": "from transformers.optimization import Adafactor; optimizer = "
    "Adafactor(net.parameters(), 1e-3, beta1=0.9, relative_step=False, scale_parameter=False)",
}


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (LION, "Lion"),
        (OWN, "Own"),
        *((f"\n    {code}\n", name.split()[0]) for name, code in LIBRARIES.items()),
    ],
    ids=["Lion", "state in attributes", *LIBRARIES],
)
def test_a_step_has_what_its_ops_touch(tmp_path: Path, optimizer: str, name: str):
    """All at once, parameters, gradients, state and temporaries take 34 to 44 MiB."""
    ran = inline(tmp_path, "24MiB", NET + optimizer + TRAIN, offload=str(tmp_path))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    (loop,) = ran.loops
    assert f"state of `{name}` waits in mapped files between its steps" in loop["notes"]


SAM = """
    class SAM(torch.optim.Optimizer):
        def __init__(self, parameters, base, **settings):
            super().__init__(parameters, settings)
            self.base_optimizer = base(self.param_groups, **settings)
            self.param_groups = self.base_optimizer.param_groups
        @torch.no_grad()
        def first_step(self, zero_grad=False):
            listed = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in listed]).norm()
            for p in listed:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (0.05 / norm))
            self.zero_grad()
        @torch.no_grad()
        def second_step(self, zero_grad=False):
            for p in (p for group in self.param_groups for p in group["params"]):
                p.data = self.state[p]["old"]
            self.base_optimizer.step()
            self.zero_grad()
        def step(self, closure):
            self.first_step()
            with torch.enable_grad():
                closure()
            self.second_step()
    optimizer = SAM(net.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    for step in range(6):
        x = torch.randn(64, 512)
        def closure():
            loss = (net(x) - x).square().mean()
            loss.backward()
            return loss
        loss = closure()
        STEP
        print(repr(loss.item()))
    torch.save(list(net.parameters()), "trained.pt")
"""


@pytest.mark.parametrize(
    "step",
    ["optimizer.step(closure)", "optimizer.first_step(); closure(); optimizer.second_step()"],
)
def test_two_steps_of_sharpness_aware_minimization(tmp_path: Path, step: str):
    """What `first_step` copies was there, with all momentum, beside the pass after it: 41 MiB."""
    ran = inline(tmp_path, "24MiB", NET + SAM.replace("STEP", step), offload=str(tmp_path))
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_optimizers_look_at_their_settings_before_they_have_parameters(tmp_path: Path):
    """As those of libraries do; the second one's look was taken for a step, and memfit gave up."""
    own = """def __init__(self, parameters, base, **settings):
            self.allow(settings["lr"])"""
    checked = SAM.replace("def __init__(self, parameters, base, **settings):", own).replace(
        "        @torch.no_grad()\n        def first_step",
        "        def allow(self, rate):\n            assert rate > 0\n"
        "        @torch.no_grad()\n        def first_step",
    )
    made = "optimizer = SAM(net.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)"
    step = "optimizer.first_step(); closure(); optimizer.second_step()"
    code = NET + checked.replace(made, f"{made}; {made}").replace("STEP", step)
    ran = inline(tmp_path, "24MiB", code, offload=str(tmp_path))
    assert "memfit failed" not in ran.stderr
    assert ran.fitting["verdict"]["kept"], ran.stderr


SCHEDULE_FREE = """
    class Averaged(Lion):
        def turn(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.lerp_(self.state[p]["mean"], 0.1)
    optimizer, augment = Averaged(net.parameters()), nn.Dropout(0.1)
    for step in range(6):
        x = augment(torch.randn(64, 512))
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.turn()
        with torch.no_grad():
            print(repr(loss.item()), net(x).sum().item())
        optimizer.turn()
    torch.save([list(net.parameters()), optimizer.state_dict()], "trained.pt")
"""


def test_methods_that_write_parameters_come_between_evaluations_and_passes(tmp_path: Path):
    """As schedule-free optimizers do: what an evaluation had offloaded is in memory again."""
    ran = inline(tmp_path, "24MiB", NET + LION + SCHEDULE_FREE, offload=str(tmp_path))
    assert "memfit failed" not in ran.stderr
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_a_closure_computes_the_gradients(tmp_path: Path):
    """As Lightning calls steps: they take what they took before it ran."""
    train = TRAIN.replace("loss.backward()", "pass").replace(
        "optimizer.step()", "loss = optimizer.step(closure)"
    )
    closure = """
    def closure():
        optimizer.zero_grad()
        x = torch.randn(64, 512)
        loss = (net(x) - x).square().mean()
        loss.backward()
        return loss
"""
    lines = [it for it in train.splitlines() if "x = " not in it and "loss = (" not in it]
    train = "\n".join(it for it in lines if "zero_grad" not in it)
    ran = inline(tmp_path, "26MiB", NET + LION + closure + train, offload=str(tmp_path))
    assert ran.fitting["verdict"]["kept"], ran.stderr


READS = """
    def read(step, state):
        global kept, view
        first = net[0].weight
        if step == 1:
            kept = state[first]["mean"]
            print(kept.sum().item(), kept.numpy()[0, :3], first.detach().numpy()[0, :3])
        if step == 2:
            print(kept is state[first]["mean"], kept.sum().item(), kept.tolist()[0][:3])
            view = state[net[2].weight]["mean"].view(-1)[:5]
            for it in state.values():
                it["square"].mul_(0.5)
        if step == 3:
            print(view.tolist())
            torch.save([net.state_dict(), optimizer.state_dict()], "saved.pt")
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 0.1})
            optimizer.param_groups.pop()
        if step == 4:
            saved = torch.load("saved.pt")
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            view = state[net[2].weight]["mean"].view(-1)[:5]
        if step == 5:
            print(view.tolist(), [it["mean"].sum().item() for it in optimizer.state.values()])
"""


def test_the_script_sees_state_as_it_is(tmp_path: Path):
    """It keeps it, views it, changes it, saves and loads it between steps."""
    code = (
        NET
        + LION
        + READS
        + TRAIN.replace("optimizer.step()", "optimizer.step(); read(step, optimizer.state)")
    )
    ran = inline(tmp_path, "24MiB", code, offload=str(tmp_path))
    assert "state of `Lion` waits in mapped files between its steps" in ran.loops[0]["notes"]


NEW = "new = p.detach() - 0.01 * p.grad"


@pytest.mark.parametrize(
    ("write", "why"),
    [
        ("numpy.subtract(p.detach().numpy(), p.grad.numpy(), out=p.detach().numpy())", None),
        (f"{NEW}; ctypes.memmove(p.data_ptr(), new.data_ptr(), p.nbytes)", "takes addresses"),
        (f"{NEW}; new.numpy().tofile('new'); read(self.places[p], p)", "writes tensors"),
    ],
    ids=["arrays", "addresses", "addresses kept"],
)
def test_writes_by_no_op(tmp_path: Path, write: str, why: str | None):
    """To addresses that the optimizer has kept since it was made, too, so nothing may move."""
    code = f"""
    import ctypes
    import numpy
    def read(place, p):
        whole = numpy.fromfile("new", numpy.float32)
        ctypes.memmove(place, whole.ctypes.data, p.nbytes)
    class Raw(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, dict(lr=1e-4))
            self.places = {{p: p.data_ptr() for p in self.param_groups[0]["params"]}}
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                {write}
    optimizer = Raw(net.parameters())
"""
    ran = inline(tmp_path, "24MiB", NET + code + TRAIN, offload=str(tmp_path))
    assert any(f"`Raw` {why}" in note for note in ran.loops[0]["notes"]) == (why is not None)


@pytest.mark.parametrize("forbid", [[], ["--forbid", "offload_optimizer"]])
def test_nothing_goes_where_that_is_forbidden(tmp_path: Path, forbid: list[str]):
    """Nor is anything said to have gone."""
    place = str(tmp_path) if forbid else None
    ran = inline(tmp_path, "24MiB", NET + LION + TRAIN, offload=place, fitting=forbid)
    assert not ran.fitting["verdict"]["kept"]
    assert not any("Lion" in note for note in ran.loops[0]["notes"])


def test_a_step_that_raises_leaves_all_as_it_was(tmp_path: Path):
    """In the middle of its updates, as where the script finds a number that is none."""
    raises = LION.replace(
        'state["square"].add_(gradient.square())',
        'state["square"].add_(gradient.square()); self.count = getattr(self, "count", 0) + 1\n'
        + " " * 20
        + 'if self.count == 47: raise ArithmeticError("in the middle")',
    )
    train = TRAIN.replace("optimizer.step()", "attempt()")
    attempt = textwrap.indent(
        textwrap.dedent("""
            def attempt():
                try:
                    optimizer.step()
                except ArithmeticError as error:
                    print(error, [p.sum().item() for p in net.parameters()])
        """),
        "    ",
    )
    inline(tmp_path, "24MiB", NET + raises + attempt + train, offload=str(tmp_path))
