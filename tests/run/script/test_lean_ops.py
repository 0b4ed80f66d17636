"""Ops in pieces: equivalent results, with less memory inside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import inline
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memfit.options import Options
from memfit.run.script.lean_ops import ENOUGH_PASSES, IN_PIECES, LeanOps, LeanWay
from memfit.run.script.request import FitRequest
from memfit.run.script.verdict import Peak
from memfit.track import cpu

MIB = 1 << 20

NET = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = []
    for inside, outside in ((3, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()
            print(f"{model(x).sum():.3f}")
            model.train()
        print(f"{loss:.4f}")
"""


def lean(promise: str = "equivalent", forbid: tuple[str, ...] = ()) -> LeanOps:
    return LeanOps(FitRequest("1GiB", Options(allow=(promise,), forbid=forbid)))


def test_a_batch_that_normalisation_mixes_trains_with_less_scratch(tmp_path: Path):
    """The activations are of 4 MiB: a convolution's backward alone takes four of them."""
    options = {"offload": "chosen"}
    ran = inline(tmp_path, "16MiB", NET, fitting=("--allow", "equivalent"), **options)
    (loop,) = ran.loops
    assert IN_PIECES in loop["notes"]
    assert ran.report["fitting"]["verdict"]["kept"], ran.stderr
    assert "results stay bitwise equal" not in ran.stderr
    (tmp_path / "exact").mkdir()
    exact = inline(tmp_path / "exact", "16MiB", NET)
    assert IN_PIECES not in exact.loops[0]["notes"]
    assert not exact.report["fitting"]["verdict"]["kept"]


def test_no_op_is_looked_at_in_a_pass_that_is_planned_with_whole_ones():
    cut = LeanWay()
    for _ in range(2 * ENOUGH_PASSES):
        with lean().in_pieces(1 << 30, {}, cut):
            assert len(_get_current_dispatch_mode_stack()) == 1
            cut.pass_begins(is_planned_without=True)
            assert not _get_current_dispatch_mode_stack()
        cut.pass_begins()
    with lean().in_pieces(1 << 30, {}, cut):
        cut.pass_begins()
        assert len(_get_current_dispatch_mode_stack()) == 1


@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.Conv1d(8, 8, 1)], ids=repr)
def test_each_op_is_looked_at_only_where_there_are_some_to_cut(module: nn.Module):
    """Until a step is recorded anew, which may hold others."""
    cut, looked_at = LeanWay(), []

    def passes(count: int) -> list[int]:
        for _ in range(count):
            with lean().in_pieces(1 << 30, {}, cut):
                looked_at.append(len(_get_current_dispatch_mode_stack()))
                module(torch.randn(2, 8, 8))
        return looked_at[-2:]

    has_some = isinstance(module, nn.Conv1d)
    assert passes(ENOUGH_PASSES + 2) == 2 * [has_some]
    cut.was_mixed()
    assert passes(2) == [1, 1]


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.BatchNorm2d(8, affine=False, track_running_stats=False),
        nn.BatchNorm2d(8).eval(),
    ],
    ids=repr,
)
def test_results_are_those_of_whole_ops(module: nn.Module, order: torch.memory_format):
    torch.manual_seed(0)
    batch = torch.randn(13, 8, 9, 9).contiguous(memory_format=order).requires_grad_()
    found = {}
    for budget_bytes in (0, 1 << 12):
        module.zero_grad()
        batch.grad = None
        notes: dict[str, None] = {}
        with lean().in_pieces(budget_bytes, notes, LeanWay(always=True)):
            out = module(batch)
            out.square().mean().backward()
        gradients = [batch.grad, *(parameter.grad for parameter in module.parameters())]
        found[budget_bytes] = [out.detach(), *(it.clone() for it in gradients if it is not None)]
        strides = [out.stride(), out.shape]
        assert (IN_PIECES in notes) == (budget_bytes > 0)
        found[budget_bytes].append(torch.tensor([*strides[0], *strides[1]]))
    torch.testing.assert_close(found[1 << 12], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(8, 16, 3, padding=1), (8, 33, 17)),
        (nn.Conv2d(8, 8, 5, stride=2, padding=(3, 1), groups=4, bias=False), (8, 40, 24)),
        (nn.Conv2d(8, 4, 3, dilation=(4, 2), padding=(4, 2)), (8, 29, 20)),
        (nn.Conv2d(8, 4, (7, 1), stride=(3, 1)), (8, 64, 5)),
        (nn.Conv2d(8, 4, 1), (8, 24, 24)),
        (nn.Conv3d(8, 4, 3, padding=1), (8, 18, 12, 11)),
        (nn.Conv3d(4, 8, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)), (4, 12, 9, 9)),
    ],
    ids=repr,
)
def test_results_in_strips_are_those_of_whole_ops(
    module: nn.Module, shape: tuple[int, ...], items: int
):
    torch.manual_seed(0)
    batch = torch.randn(items, *shape, requires_grad=True)
    found = {}
    for budget_bytes in (0, 1 << 12):
        module.zero_grad()
        batch.grad = None
        notes: dict[str, None] = {}
        with lean().in_pieces(budget_bytes, notes, LeanWay(always=True)):
            out = module(batch)
            out.square().mean().backward()
        assert (IN_PIECES in notes) == (budget_bytes > 0)
        gradients = [batch.grad, *(parameter.grad for parameter in module.parameters())]
        found[budget_bytes] = [out.detach(), *(it.clone() for it in gradients if it is not None)]
    torch.testing.assert_close(found[1 << 12], found[0], rtol=1e-5, atol=1e-6)


def test_a_kernel_as_large_as_the_image_makes_no_strips():
    notes: dict[str, None] = {}
    with lean().in_pieces(1 << 12, notes, LeanWay(always=True)):
        out = nn.Conv2d(4, 4, (60, 3))(torch.randn(1, 4, 64, 9))
    assert out.shape == (1, 4, 5, 7)
    assert not notes


@pytest.mark.parametrize("channels", [8, 48])
def test_one_volume_takes_less_inside(channels: int):
    """Few channels are copied with all their surroundings, 27 times the volume; so would be strips
    of many."""
    assert cpu.start() is None
    module = nn.Conv3d(channels, 8, 3, padding=1)
    batch = torch.randn(1, channels, 32, 32, 32, requires_grad=True)
    peaks = []
    for budget_bytes in (0, 32 * MIB):
        with lean().in_pieces(budget_bytes, {}, LeanWay(always=True)):
            peak = Peak(torch.device("cpu"))
            loss = module(batch).sum()
            peaks.append(peak.close())
            peak = Peak(torch.device("cpu"))
            loss.backward()
            peaks.append(peak.close())
        del loss
        batch.grad = None
        module.zero_grad()
    whole, backward, cut, cut_backward = peaks
    assert cut <= whole
    assert cut_backward <= backward
    if channels == 8:
        assert whole - cut > 20 * MIB
        assert backward - cut_backward > 20 * MIB


def test_a_frozen_convolution_has_no_gradients_of_weights():
    module = nn.Conv2d(4, 4, 3).requires_grad_(requires_grad=False)
    batch = torch.randn(8, 4, 9, 9, requires_grad=True)
    with lean().in_pieces(1 << 12, {}, LeanWay(always=True)):
        module(batch).sum().backward()
    assert module.weight.grad is None
    assert batch.grad is not None


def test_a_convolution_takes_less_inside():
    assert cpu.start() is None
    module, batch = nn.Conv2d(32, 32, 3, padding=1), torch.randn(32, 32, 32, 32, requires_grad=True)
    peaks = []
    for budget_bytes in (0, 16 * MIB):
        with lean().in_pieces(budget_bytes, {}, LeanWay(always=True)):
            loss = module(batch).sum()
            peak = Peak(torch.device("cpu"))
            loss.backward()
            peaks.append(peak.close())
        batch.grad = None
    whole, cut = peaks
    assert whole - cut > 6 * MIB


def test_ops_run_whole_where_a_plan_of_whole_ones_fits(tmp_path: Path):
    """Leave to round is used once nothing else does."""
    for name in ("exact", "equivalent"):
        (tmp_path / name).mkdir()
    budget, options = "26MiB", {"offload": "chosen"}
    exact = inline(tmp_path / "exact", budget, NET, **options)
    fitting = ("--allow", "equivalent")
    ran = inline(tmp_path / "equivalent", budget, NET, fitting=fitting, **options)
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert IN_PIECES not in ran.loops[0]["notes"]
    assert ran.stdout == exact.stdout


@pytest.mark.parametrize(("promise", "forbid"), [("exact", ()), ("equivalent", ("micro_batch",))])
def test_nothing_is_cut_without_leave(promise: str, forbid: tuple[str, ...]):
    notes: dict[str, None] = {}
    with lean(promise, forbid).in_pieces(1 << 12, notes, LeanWay(always=True)):
        nn.Conv2d(4, 4, 3)(torch.randn(8, 4, 9, 9))
    assert not notes


def test_ops_stay_in_pieces_when_something_compiled_runs_beside_the_steps(tmp_path: Path):
    """Their plan counts on it."""
    code = NET.replace(
        '            print(f"{model(x).sum():.3f}")',
        "            print(f\"{torch.compile(torch.sum, backend='eager')(model(x)):.3f}\")",
    )
    assert code != NET
    ran = inline(tmp_path, "18MiB", code, offload="chosen", fitting=("--allow", "equivalent"))
    assert ran.loops[0]["planned"]["steps"] > 0
    assert ran.fitting["verdict"]["kept"], ran.stderr
