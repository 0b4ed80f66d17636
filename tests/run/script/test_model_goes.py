"""A model that the script lets go of is gone, with its optimizer, as without memfit."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

TURNS = """
    import torch, weakref
    from torch import nn

    torch.manual_seed(0)
    def train(kind):
        model = nn.Sequential(*[it for _ in range(5) for it in (nn.Linear(512, 512), nn.ReLU())])
        optimizer = kind(model.parameters())
        for step in range(6):
            x = torch.randn(256, 512)
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
        with torch.no_grad():
            print(repr(model(x).sum().item()))
        return weakref.ref(model), weakref.ref(optimizer)
    for kind in (torch.optim.Adagrad, torch.optim.AdamW):
        print([it() is None for it in train(kind)])
"""
"""Each turn takes 25 MiB, of which 10 to 15 stay from the turn before if its model does."""


@pytest.mark.parametrize("budget", ["22MiB", "18MiB", "14MiB"])
@pytest.mark.parametrize("gradients", ["no_grad", "enable_grad"])
def test_a_model_and_its_optimizer_go_when_the_script_lets_go_of_them(
    tmp_path: Path, budget: str, gradients: str
):
    """The executor of the last pass held both until another model's first."""
    code, fitting = TURNS.replace("no_grad", gradients), ("--forbid", "offload_parameters")
    ran = inline(tmp_path, budget, code, offload=str(tmp_path), fitting=fitting)
    assert len(ran.loops) == 2
    assert ran.fitting["verdict"]["kept"], ran.stderr


DROPPED = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self, copies):
            super().__init__()
            self.copies = copies
            layers = [it for _ in range(8) for it in (nn.Linear(512, 512), nn.GELU())]
            self.body, self.head = nn.Sequential(*layers), nn.Linear(512, 512)
        def forward(self, x):
            x = self.body(x)
            if self.copies:
                x = x + copy.deepcopy(self.head)(x).detach()
            return self.head(x)
    for copies in (False, True):
        model = Net(copies)
        optimizer = torch.optim.AdamW(model.parameters())
        weights = list(model.parameters())
        for step in range(5):
            x = torch.randn(512, 512)
            loss = nn.functional.mse_loss(model(x), x)
            if step == 4:
                del model
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
        again = sum(weight.square().sum() for weight in weights)
        optimizer.zero_grad()
        again.backward()
        optimizer.step()
        print(repr(again.item()), [weight.sum().item() for weight in weights])
        moments = optimizer.state_dict()["state"].values()
        print([value.sum().item() for state in moments for value in state.values()])
        del optimizer, weights, loss, again
"""
"""A step takes 57 MiB."""


@pytest.mark.parametrize(
    ("budget", "place", "forbidden"),
    [
        ("43MiB", None, "fuse_optimizer"),
        ("23MiB", "files", "fuse_optimizer"),
        ("34MiB", "files", "offload_optimizer"),
    ],
)
def test_a_model_that_is_dropped_before_backward_leaves_its_step_whole(
    tmp_path: Path, budget: str, place: str | None, forbidden: str
):
    """What was elsewhere was let go of with it, and backward met memory that was not there."""
    folder = None if place is None else str(tmp_path)
    ran = inline(tmp_path, budget, DROPPED, offload=folder, fitting=("--forbid", forbidden))
    assert "memfit failed" not in ran.stderr


IN_PIECES = """
    import torch, weakref
    from torch import nn

    torch.manual_seed(0)
    data = torch.randn(2048, 64)
    def made(width):
        layers = [it for _ in range(2) for it in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 4))
    def train(width):
        model, teacher = made(width), made(512)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(5):
            with torch.no_grad():
                y = teacher(data)[:512]
            loss = nn.functional.mse_loss(model(data[:512]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(data)
        return weakref.ref(model), weakref.ref(teacher)
    for width in (256, 384, 256):
        print([it() is None for it in train(width)])
"""
"""A teacher's forward takes 8 MiB beside its 2.7, a model's 4 to 6 MiB."""


def test_models_that_were_called_on_pieces_of_their_batch_go(tmp_path: Path):
    """What ran a call on pieces held the model for as long as its loop, or for good."""
    ran = inline(tmp_path, "8MiB", IN_PIECES, fitting=("--allow", "equivalent"))
    assert ran.stdout.splitlines() == 3 * ["[True, True]"]
    notes = [note for loop in ran.loops for note in loop["notes"]]
    assert any("evaluations on pieces of their batch" in note for note in notes)
    assert "forwards of models that no step trains, on pieces of their batch" in ran.stderr


EACH_ITS_OWN = """
    import gc, sys, torch
    from torch import nn

    collect, collected = gc.collect, []
    gc.collect = lambda *of: (collected.append(of), collect(*of))[1]
    torch.manual_seed(0)
    model = nn.Sequential(*[it for _ in range(10) for it in (nn.Linear(256, 256), nn.ReLU())])
    optimizers = {}
    for step in range(4):
        x = torch.randn(512, 256)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        for parameter in model.parameters():
            if parameter not in optimizers:
                optimizers[parameter] = torch.optim.Adam([parameter])
            optimizers[parameter].step()
            parameter.grad = None
        print(repr(loss.item()))
    print(f"collected {len(collected)} times", file=sys.stderr)
"""
"""As Pyro has it. The first step leaves 5 MiB of state, optimizer by optimizer."""


def test_garbage_is_collected_once_where_each_parameter_gets_its_optimizer(tmp_path: Path):
    """A collection takes a tenth of a second where large libraries are loaded."""
    ran = inline(tmp_path, "10MiB", EACH_ITS_OWN)
    [count] = [line for line in ran.stderr.splitlines() if line.startswith("collected")]
    assert count == "collected 1 times"


IN_CYCLES = """
    import sys, torch, weakref
    from torch import nn

    torch.manual_seed(0)
    gone = []
    def train(width):
        layers = [it for _ in range(5) for it in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers)
        model.itself = [model]
        gone.append(weakref.ref(model))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        print([it() is None for it in gone], file=sys.stderr)
        for step in range(6):
            x = torch.randn(512, width)
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
            with torch.no_grad():
                print(repr(model(torch.randn(2048, width)).sum().item()))
    for width in (512, 512, 256):
        train(width)
"""
"""The last call of each model leaves its parameters in files; the third has a quarter of them."""


def test_a_model_goes_whose_parameters_are_elsewhere(tmp_path: Path):
    """Its parameters would come back to memory, where the model is garbage not yet collected."""
    ran = inline(tmp_path, "14MiB", IN_CYCLES, offload=str(tmp_path))
    seen = [line for line in ran.stderr.splitlines() if line.startswith("[")]
    assert seen == ["[False]", "[True, False]", "[True, True, False]"]
