"""What a call of torch's is about to take, and what gives way to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import inline
from torch import Tensor, nn

from memfit import _native
from memfit.run.script.factories import about_to_take
from memfit.run.script.held_in_files import MADE_IN_FILES, HeldInFiles
from memfit.track import cpu

MIB = 1 << 20


def is_mapped(tensor: Tensor) -> bool:
    return not _native.is_counted(tensor.untyped_storage().data_ptr())


def test_what_torch_is_about_to_make_is_told_in_bytes():
    whole = torch.zeros(1024, 1024)
    for function, args, kwargs in [
        (torch.empty, ((1024, 512),), {"dtype": torch.float64}),
        (torch.randn, (1024, 1024), {"device": "cpu"}),
        (torch.zeros, (), {"size": (1 << 20,)}),
        (torch.ones, (1 << 20,), {"dtype": float}),
        (torch.zeros_like, (whole,), {}),
        (torch.Tensor.clone, (whole,), {}),
        (torch.Tensor.double, (whole,), {}),
        (torch.Tensor.half, (whole,), {}),
        (torch.abs, (whole,), {}),
        (torch.Tensor.pow, (whole, 2), {}),
        (torch.Tensor.new_empty, (whole, (1024, 512)), {}),
        (torch.Tensor.new_zeros, (whole.half(), 1024, 1024), {}),
        (torch.Tensor.new_full, (whole, (1024, 1024), 3), {"dtype": torch.float64}),
    ]:
        assert about_to_take(function, args, kwargs) == function(*args, **kwargs).nbytes
    for function, args, kwargs in [
        (torch.empty, (1 << 20,), {"device": "meta"}),
        (torch.empty, (16,), {}),
        (torch.clone, (whole.to("meta"),), {}),
        (torch.Tensor.float, (whole,), {}),
        (torch.Tensor.double, (whole[:8],), {}),
        (torch.add, (whole, whole), {}),
        (torch.Tensor.new_ones, (whole, 1024, 1024), {"device": "meta"}),
        (torch.zeros, (), {}),
        (torch.zeros, ((),), {}),
        (torch.Tensor.add_, (whole.to_sparse(), 1), {}),
        (nn.init.zeros_, (), {"tensor": whole}),
        (len, ([whole],), {}),
    ]:
        assert about_to_take(function, args, kwargs) == 0


@pytest.mark.parametrize("function", [torch.linalg.qr, torch.linalg.svd])
@pytest.mark.parametrize("shape", [(1024, 1024), (2048, 512), (512, 2048)])
def test_a_decomposition_takes_no_more_than_is_told(function, shape):
    assert cpu.start() is None
    matrix = torch.randn(shape)
    given = {"full_matrices": False} if function is torch.linalg.svd else {}
    window, before = cpu.Window(), _native.counted_bytes()
    made = function(matrix, **given)
    reading = window.close()
    assert reading is not None
    took = reading.peak_bytes - before
    assert matrix.nbytes < took <= about_to_take(function, (matrix,), given)
    assert made is not None


ORTHOGONAL = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    model.requires_grad_(False)
    picture = torch.rand(16, 1024, requires_grad=True)
    optimizer = torch.optim.Adam([picture])
    for step in range(4):
        optimizer.zero_grad()
        loss = model(picture).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_weights_wait_in_files_while_others_are_made_orthogonal(tmp_path: Path):
    """24 MiB of weights, and 12 for the factors of one of 4."""
    ran = inline(tmp_path, "26MiB", ORTHOGONAL, offload=str(tmp_path))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert any(MADE_IN_FILES in loop["notes"] for loop in ran.loops)


CUT = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)

    def whole():
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 1024)]
        return nn.Sequential(*layers, *[nn.Linear(1024, 1024) for _ in range(4)])

    cut = whole()[:2]
    for p in cut.parameters():
        p.requires_grad_(False)
    twin = copy.deepcopy(cut)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(5):
        x = torch.rand(2, 3, 32, 32)
        loss = (cut(net(x)) - twin(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_a_model_that_is_made_whole_and_cut_fits_one_layer_at_a_time(tmp_path: Path):
    """44 MiB are made, of which one layer is 28 and a KiB stays."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "31MiB", CUT, offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert all(MADE_IN_FILES in loop["notes"] for loop in ran.loops)


def test_what_is_initialised_after_it_went_goes_again(tmp_path: Path):
    """As torchvision's ResNets are: every weight is written once all layers are there."""
    (tmp_path / "disk").mkdir()
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    teacher = nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)])
    for module in teacher:
        nn.init.kaiming_normal_(module.weight)
    teacher.requires_grad_(False)
    student = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 512))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(64, 512)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    ran = inline(tmp_path, "9MiB", code, offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert all(MADE_IN_FILES in loop["notes"] for loop in ran.loops)


def test_what_is_written_before_the_first_step_is_memory_until_it_goes_again(held: HeldInFiles):
    """No variable of a function holds the weight: such a tensor stays as it is."""
    model = nn.Linear(1024, 1024)
    size = model.weight.nbytes
    assert held.make_room(1 << 20)
    assert is_mapped(model.weight)
    assert held.written_bytes() == 0
    for _ in range(2):  # initialised, and read from a checkpoint
        assert about_to_take(torch.Tensor.copy_, (model.weight, model.weight), {}) == size
        assert about_to_take(nn.init.normal_, (), {"tensor": model.weight}) == size
        nn.init.normal_(model.weight)
        assert held.written_bytes() == size
        expected = model.weight.detach().clone()
        held.make_room(1 << 20)
        assert is_mapped(model.weight)
        assert held.written_bytes() == 0
        assert torch.equal(model.weight, expected)
    plain = torch.zeros(1024, 1024)
    assert about_to_take(torch.Tensor.copy_, (plain, plain), {}) == 0


def test_a_model_stays_in_memory_that_has_room_there(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "60MiB", CUT, offload=str(tmp_path / "disk"))
    assert ran.fitting["verdict"]["peak_bytes"] > 40 * MIB
    assert not any(MADE_IN_FILES in loop["notes"] for loop in ran.loops)


def test_a_model_that_went_is_back_to_be_trained(tmp_path: Path):
    """4 MiB of weights beside 16 that are there for a moment."""
    (tmp_path / "disk").mkdir()
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1024))
    moment = torch.zeros(4096, 1024)
    del moment
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(torch.rand(64, 1024)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "end.pt")
    """
    ran = inline(tmp_path, "19MiB", code, offload=str(tmp_path / "disk"))
    (loop,) = ran.loops
    assert MADE_IN_FILES in loop["notes"]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert loop["planned"]["steps"] >= 3
