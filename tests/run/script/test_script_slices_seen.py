"""Losses in slices under ``memfit run``: who looks at logits late, or writes to what makes them.

Each script does so from its fourth step on, when slices have been planned.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest
from ran import inline

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

torch.manual_seed(0)
classes, width, items, length = 8000, 64, 8, 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes, bias=False)
        self.halves = False

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.body(hidden)
        logits = self.head(hidden)
        if self.halves:
            hidden.mul_(0.5)
        return logits


class Names(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("linear", "cross_entropy"):
            print(func.__name__, tuple(result.shape), f"{result.mean().item():.3e}")
        return result


def shown(gradient):
    print(f"{gradient.abs().sum().item():.4g}")


def weights():
    return {name: it.clone() for name, it in model.state_dict().items()}


def loss_of(step, tokens):
    x, y = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    late = step >= 3
LOSS


model = Net()
BEFORE
optimizer = torch.optim.SGD([it for it in model.parameters() if it.requires_grad], lr=0.5)
for step in range(6):
    tokens = torch.randint(0, classes, (items, length + 1))
    optimizer.zero_grad()
    loss = loss_of(step, tokens)
    loss.backward()
    gradients = [it.grad.abs().sum().item() for it in model.parameters() if it.grad is not None]
    print(f"{loss.item():.4f}", *(f"{it:.4g}" for it in gradients))
    optimizer.step()
"""

LOSSES = {
    "a hook on logits after their loss": """
        logits = model(x)
        loss = F.cross_entropy(logits.reshape(-1, classes), y)
        if late:
            logits.register_hook(lambda gradient: 0.5 * gradient)
        return loss
    """,
    "a hook on what follows from logits, and one on the node": """
        logits = model(x)
        flat = logits.reshape(-1, classes)
        loss = F.cross_entropy(flat, y)
        if late:
            flat.register_hook(lambda gradient: 3 * gradient)
            torch.autograd.graph.register_multi_grad_hook([logits], lambda it: shown(it[0]))
        return loss
    """,
    "gradients that logits keep": """
        global logits
        if late and step > 3:
            shown(logits.grad)
        logits = model(x)
        loss = F.cross_entropy(logits.reshape(-1, classes), y)
        if late:
            logits.retain_grad()
        return loss
    """,
    "gradients by logits": """
        logits = model(x)
        loss = F.cross_entropy(logits.reshape(-1, classes), y)
        if late:
            for it in torch.autograd.grad(loss, [logits, model.head.weight], retain_graph=True):
                shown(it)
        return loss
    """,
    "a write to logits after a copy": """
        logits = model(x).reshape(-1, classes)
        copies = logits.log_softmax(-1), logits.double(), logits[y % 3 != 0]
        if late:
            logits.mul_(0.5)
        losses = F.nll_loss(copies[0], y), F.cross_entropy(copies[1], y)
        return sum(losses) + F.cross_entropy(copies[2], y[y % 3 != 0])
    """,
    "a write through data after a copy": """
        logits = model(x).reshape(-1, classes)
        copy = logits.log_softmax(-1)
        if late:
            logits.data.zero_()
        return F.nll_loss(copy, y)
    """,
    "a write to weights before the loss": """
        logits = model(x)
        if late:
            model.head.weight.data.clamp_(-0.01, 0.01)
        return F.cross_entropy(logits.reshape(-1, classes), y)
    """,
    "weights that are others for a while": """
        if late:
            now = weights()
            with torch.no_grad():
                mine = model(x)
                model.load_state_dict({name: 0.5 * it for name, it in now.items()})
                others = model(x)
                model.load_state_dict(now)
            print(f"{(mine - others).abs().mean().item():.4g}")
        return F.cross_entropy(model(x).reshape(-1, classes), y)
    """,
    "a write to features without gradients": """
        if late:
            model.halves = True
            with torch.no_grad():
                print(f"{model(x).abs().mean().item():.4g}")
            model.halves = False
        return F.cross_entropy(model(x).reshape(-1, classes), y)
    """,
    "logits without a graph in a loss with one": """
        loss = F.cross_entropy(model(x).reshape(-1, classes), y)
        if late:
            with torch.no_grad():
                logits = model(x)
            other = F.cross_entropy(logits.reshape(-1, classes), y)
            print(other.requires_grad)
            loss = loss + other
        return loss
    """,
    "weights that are frozen when the loss is computed": """
        logits = model(x)
        model.head.weight.requires_grad_(not late)
        loss = F.cross_entropy(logits.reshape(-1, classes), y)
        model.head.weight.requires_grad_(True)
        return loss
    """,
    "weights that are frozen by name when the loss is computed": """
        logits = model(x)
        model.head.weight.requires_grad_(requires_grad=not late)
        loss = F.cross_entropy(logits.reshape(-1, classes), y)
        model.head.weight.requires_grad_(requires_grad=True)
        return loss
    """,
    "weights that are trained again when the loss is computed": """
        model.head.weight.requires_grad_(not late)
        logits = model(x)
        model.head.weight.requires_grad_(True)
        return F.cross_entropy(logits.reshape(-1, classes), y)
    """,
    "a weight that is computed from then on": """
        if step == 3:
            torch.nn.utils.parametrizations.spectral_norm(model.head)
        return F.cross_entropy(model(x).reshape(-1, classes), y)
    """,
    "a function mode of the script's": """
        if not late:
            return F.cross_entropy(model(x).reshape(-1, classes), y)
        with Names():
            return F.cross_entropy(model(x).reshape(-1, classes), y)
    """,
    "a loss of torch's that is replaced": """
        if step == 3:
            own = F.cross_entropy
            F.cross_entropy = lambda logits, y: print(tuple(logits.shape)) or own(logits, y)
        return F.cross_entropy(model(x).reshape(-1, classes), y)
    """,
    "targets that torch refuses": """
        if late:
            logits = model(x).reshape(-1, classes)
            for target in (y + classes, y - classes, y.int()):
                try:
                    F.cross_entropy(logits, target)
                except (IndexError, RuntimeError) as error:
                    print(type(error).__name__, str(error).split(",")[0])
        return F.cross_entropy(model(x).reshape(-1, classes), y)
    """,
}


def sliced(tmp_path: Path, loss: str, before: str = "") -> None:
    code = SCRIPT.replace("LOSS", indent(dedent(loss), 4 * " ")).replace("BEFORE", before)
    ran = inline(tmp_path, "36MiB", code, fitting=("--allow", "equivalent"))
    assert "with its loss in slices" in ran.stderr


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_logits_in_slices_are_what_whole_ones_would_be(tmp_path: Path, loss: str):
    sliced(tmp_path, loss)


def test_features_that_a_frozen_head_has_read_may_be_written_to(tmp_path: Path):
    loss = """
        model.halves = late
        return F.cross_entropy(model(x).reshape(-1, classes), y)
    """
    sliced(tmp_path, loss, "model.head.weight.requires_grad_(False)")


def test_no_mode_stays_on_the_stack(tmp_path: Path):
    loss = """
        with torch.no_grad():
            kept = model(x)
        print([type(it).__name__ for it in modes() if "Deferring" in type(it).__name__][1:])
        return F.cross_entropy(model(x).reshape(-1, classes), y) + 0 * kept.mean()
    """
    before = """
def modes():
    stack = range(torch._C._len_torch_function_stack())
    return [torch._C._get_function_stack_at(place) for place in stack]
"""
    sliced(tmp_path, loss, before)
