"""What a call of torch's is about to take, and what gives way to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import inline
from torch import nn

from memfit import _native
from memfit.run.script.factories import about_to_take
from memfit.run.script.held_in_files import MADE_IN_FILES
from memfit.track import cpu


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
