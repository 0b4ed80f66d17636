"""Memory of a step's tensors that comes and goes by the ops that touch it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from memfit import _native
from memfit.apply.offload.mapped import to_file
from memfit.run.script.demand_paging import DemandPaging
from memfit.track import cpu

SIZE = 1 << 18
"""Elements of a tensor, which takes 1 MiB."""


@contextmanager
def stepping(place: Path, tensors: list[Tensor], *, room: int = 2) -> Iterator[DemandPaging]:
    """A step with room for so many of its tensors."""
    others = _native.counted_bytes() - sum(it.nbytes for it in tensors)
    step = DemandPaging(str(place), others + room * 4 * SIZE + 4096, "Lion")
    step.manage(tensors, at_once=True)
    step.begin()
    try:
        yield step
    finally:
        step.leave()
        step.bring_back()


@pytest.fixture(autouse=True)
def counting() -> None:
    assert cpu.start() is None


def made(count: int) -> list[Tensor]:
    return [torch.full((SIZE,), float(number)) for number in range(count)]


def test_what_was_used_longest_ago_goes(tmp_path: Path):
    tensors = made(4)
    with stepping(tmp_path, tensors) as step:
        for it in tensors:
            it.add_(1)
        assert step.away_bytes == 2 * 4 * SIZE
        with pytest.raises(RuntimeError, match="while `Lion` steps"):
            torch._C._to_dlpack(tensors[0])
        assert tensors[3].untyped_storage().nbytes() == 4 * SIZE
        total = sum(it[0].item() for it in tensors)
    assert total == 10.0
    assert [it.mean().item() for it in tensors] == [1.0, 2.0, 3.0, 4.0]


def test_before_it_was_seen_to_write_only_what_was_touched_goes(tmp_path: Path):
    """And of what is to be written, only what was: others may have its address."""
    gradients, parameters = made(4), made(4)
    room = _native.counted_bytes() - 6 * 4 * SIZE
    step = DemandPaging(str(tmp_path), room, "Lion")
    step.manage(gradients, at_once=False)
    step.manage(parameters, at_once=False, once_written=True)
    step.begin()
    total = sum(it.sum() for it in (*gradients[:2], *parameters))
    assert step.away_bytes == 2 * 4 * SIZE
    for it in parameters:
        it.add_(1)
    step.leave()
    assert step.away_bytes == 5 * 4 * SIZE
    step.bring_back()
    assert total == 7 * SIZE
    assert [it.mean().item() for it in parameters] == [1.0, 2.0, 3.0, 4.0]


def test_views_find_the_bytes(tmp_path: Path):
    tensors = made(3)
    with stepping(tmp_path, tensors):
        view = tensors[0].view(512, 512).t()[1:]
        for it in tensors[1:]:
            it.mul_(2)
        view.sub_(5)
    assert tensors[0].view(512, 512)[:, 1:].eq(-5).all()
    assert tensors[0].view(512, 512)[:, 0].eq(0).all()


def test_lists_are_updated_one_after_the_other(tmp_path: Path):
    """Torch's own ops on lists make the same numbers, with all in memory."""
    tensors, others = made(5), made(5)
    with stepping(tmp_path, tensors + others, room=3):
        torch._foreach_mul_(tensors, 0.5)
        torch._foreach_addcmul_(tensors, others, others, [1.0, 2.0, 3.0, 4.0, 5.0])
        norms = torch._foreach_norm(tensors)
        most = _native.counted_bytes()
    expected = [0.5 * n + (n + 1) * n * n for n in range(5)]
    assert [it[0].item() for it in tensors] == expected
    assert norms[4].item() == torch.linalg.vector_norm(tensors[4]).item()
    assert most < _native.counted_bytes() - 5 * 4 * SIZE


def test_tensors_made_of_others_have_them(tmp_path: Path):
    """A sparse tensor is given to ops that know nothing of its values' memory."""
    values, fillers = torch.ones(SIZE), made(4)
    dense = torch.zeros(2 * SIZE)
    with stepping(tmp_path, [values, *fillers, dense]):
        sparse = torch.sparse_coo_tensor(
            torch.arange(SIZE)[None], values, (2 * SIZE,), check_invariants=False
        )
        for it in fillers:
            it.add_(1)
        dense.add_(sparse)
    assert dense.sum().item() == SIZE


@pytest.mark.parametrize(
    "read",
    [lambda it: it.numpy(), lambda it: it.tolist(), lambda it: it.__array__()],
    ids=["numpy", "tolist", "array"],
)
def test_who_reads_by_no_op_finds_the_bytes(tmp_path: Path, read):
    tensors = made(4)
    with stepping(tmp_path, tensors):
        for it in tensors:
            it.add_(1)
        found = read(tensors[0])
        for it in tensors:
            it.add_(1)
    assert list(found[:2]) in ([1.0, 1.0], [2.0, 2.0])
    assert tensors[0].mean().item() == 2.0


def test_other_sizes_and_memory(tmp_path: Path):
    tensors = made(4)
    with stepping(tmp_path, tensors):
        tensors[0].resize_(2 * SIZE)[SIZE:] = 7.0
        tensors[1].data = tensors[2].clone()
        for it in tensors[2:]:
            it.add_(1)
    assert tensors[0].sum().item() == 7.0 * SIZE
    assert tensors[1].mean().item() == 2.0


def test_what_waits_in_files_comes_and_goes(tmp_path: Path):
    (state,) = made(1)
    to_file(state, str(tmp_path))
    step = DemandPaging(str(tmp_path), 1 << 40, "Lion")
    step.begin_in_file(state, None)
    before = _native.counted_bytes()
    step.stay_in_files([(state, 1)], None)
    assert _native.counted_bytes() == before
    assert state.eq(0).all()
    step.begin_in_file(state, None)
    step.begin()
    state.add_(3)
    step.leave()
    step.stay_in_files([(state, 1)], None)
    step.bring_back()
    assert state.eq(3).all()
    assert _native.counted_bytes() == before + state.nbytes


def test_without_room_on_the_disk_all_stays(tmp_path: Path):
    tensors = made(4)
    with stepping(tmp_path / "nowhere", tensors) as step:
        for it in tensors:
            it.add_(1)
        assert step.away_bytes == 0
    assert tensors[3].mean().item() == 4.0


def test_what_dlpack_lends_stays(tmp_path: Path):
    """The array has an address, and torch counts one owner of the memory all the same."""
    tensors = made(4)
    arrays = [np.from_dlpack(tensors[0]), tensors[1].numpy()]
    with stepping(tmp_path, tensors) as step:
        for number in (1, 2, 3, 0, 2, 3):
            tensors[number].add_(1)
        assert step.away_bytes > 0
        assert (arrays[0] == 1).all()
        assert (arrays[1] == 2).all()
