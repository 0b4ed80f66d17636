"""Frozen parameters are in files where a step lacks room, and the script cannot tell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ran import inline
from torch import nn

from memfit import _native
from memfit.run.script import frozen
from memfit.run.script.frozen import FrozenAway
from memfit.run.script.held_in_files import HELD_IN_FILES
from memfit.track import cpu

MIB = 1 << 20

MOMENTUM_ENCODER = """
    import torch
    from torch import nn

    def encoder():
        return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = encoder(), encoder()
            self.key.requires_grad_(False)

        def forward(self, a, b):
            with torch.no_grad():
                for p, q in zip(self.key.parameters(), self.query.parameters()):
                    p.data = p.data * 0.9 + q.data * 0.1
                near, far = self.key(a), self.key(b)
            return (self.query(a) - far).square().mean() + (self.query(b) - near).square().mean()

    torch.manual_seed(0)
    model = Momentum()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.1)
    for step in range(5):
        loss = model(torch.randn(8, 512), torch.randn(8, 512))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "end.pt")
"""


def test_a_recorded_step_does_without_a_momentum_encoder_in_backward(tmp_path: Path):
    """Beside 12 MiB of parameters, 6 MiB of gradients by the second uses wait for the first's."""
    folder = tmp_path / "files"
    folder.mkdir()
    ran = inline(tmp_path, "17MiB", MOMENTUM_ENCODER, offload=str(folder))
    assert ran.loops[0]["observed"]["peak_bytes"] <= 17 * MIB
    assert ran.fitting["verdict"]["kept"], ran.stderr


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    assert cpu.start() is None
    monkeypatch.setattr(frozen, "is_alone", lambda: True)  # other tests may have left threads
    monkeypatch.setattr(frozen, "_WORTH", 0)  # and tensors: the budget here is of what is live
    return nn.Sequential(
        nn.Linear(256, 256), nn.Linear(256, 256).requires_grad_(requires_grad=False)
    )


def is_mapped(layer: nn.Module) -> bool:
    return not _native.is_counted(layer.weight.data_ptr())


def test_frozen_parameters_go_and_come_back(model: nn.Module, tmp_path: Path):
    away, wanted, moved = FrozenAway(), model[1].weight.clone(), []
    note = lambda tensor, _: moved.append(tensor)  # noqa: E731
    away.backward_begins(model, _native.counted_bytes(), str(tmp_path), note)
    assert [is_mapped(layer) for layer in model] == [False, True]
    assert torch.equal(model[1].weight, wanted)
    model[1].weight.data.mul_(2)
    away.backward_ended(note)
    assert not is_mapped(model[1])
    assert torch.equal(model[1].weight, 2 * wanted)
    assert [it is model[1].weight for it in moved] == [True, True]


def test_who_shows_one_to_numpy_meanwhile_sees_it_later(model: nn.Module, tmp_path: Path):
    away = FrozenAway()
    away.backward_begins(model, _native.counted_bytes(), str(tmp_path), lambda *_: None)
    look = model[1].weight.numpy()
    away.backward_ended(None)
    model[1].weight.fill_(3)
    assert (look == 3).all()


def test_frozen_parameters_stay_where_there_is_room(model: nn.Module, tmp_path: Path):
    away = FrozenAway()
    away.backward_begins(model, 3 * _native.counted_bytes(), str(tmp_path), lambda *_: None)
    assert not is_mapped(model[1])


def test_a_frozen_parameter_that_dlpack_lends_stays_where_it_is(model: nn.Module, tmp_path: Path):
    array = np.from_dlpack(model[1].weight)
    FrozenAway().backward_begins(
        model, _native.counted_bytes(), str(tmp_path), lambda _tensor, _storage: None
    )
    assert not is_mapped(model[1])
    assert array[0, 0] == model[1].weight[0, 0].item()


ADAPTERS = """
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, width=512, rank=4):
            super().__init__()
            self.whole = nn.Linear(width, width).requires_grad_(False)
            self.down = nn.Linear(width, rank, bias=False)
            self.up = nn.Linear(rank, width, bias=False)

        def forward(self, x):
            return torch.relu(self.whole(x) + self.up(self.down(x)))

    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(8)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for step in range(12):
        if step == 6:
            for parameter in model[-1].parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": [*model[-1].whole.parameters()]})
        if step == 9:
            with torch.no_grad():
                model[0].whole.weight.mul_(0.9)
        loss = model(torch.randn(256, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()), model[-1].whole.weight.double().sum().item().hex())
"""


def test_frozen_weights_beside_trained_ones_take_nothing(tmp_path: Path):
    """8 MiB of them are in files, until two are trained and one is written by hand."""
    ran = inline(tmp_path, "14MiB", ADAPTERS, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert HELD_IN_FILES in ran.loops[0]["notes"]
    assert ran.loops[0]["observed"]["peak_bytes"] < 8 * MIB
