"""The file that observed steps write to: bounded, whatever the script does."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from memfit.capture.record.saves import InMemory
from memfit.run.script import spill
from memfit.run.script.spill import MOST_MEMORIES, InFile, SpillFile

SIZE = 1 << 16


@pytest.fixture
def file():
    made = SpillFile()
    yield made
    made._room.file.close()


def storage(value):
    return torch.full((SIZE,), value, dtype=torch.uint8).untyped_storage()


def test_room_of_what_nobody_needs_is_used_again(file):
    first, second = file.keep(storage(1)), file.keep(storage(2))
    assert file.bytes == 2 * SIZE
    del first
    gc.collect()
    third = file.keep(storage(3))
    assert file.bytes == 2 * SIZE
    assert [set(kept.storage.tolist()) for kept in (second, third)] == [{2}, {3}]


def test_forwards_that_never_see_a_backward_do_not_grow_it(file):
    for value in range(40):
        kept = file.keep(storage(value))
        assert file.bytes <= 2 * SIZE
    assert set(kept.storage.tolist()) == {39}


def test_all_room_goes_back_when_nobody_needs_any(file):
    first, second = file.keep(storage(1)), file.keep(storage(2))
    written = os.fstat(file._room.file.fileno()).st_size
    del first
    assert (written, file.bytes) == (2 * SIZE, 2 * SIZE)
    del second
    assert (os.fstat(file._room.file.fileno()).st_size, file.bytes) == (0, 0)
    assert set(file.keep(storage(3)).storage.tolist()) == {3}


def test_it_holds_a_few_times_what_memory_would(file, monkeypatch):
    monkeypatch.setattr(spill, "available_bytes", lambda: SIZE)
    kept = [file.keep(storage(value)) for value in range(6)]
    assert [type(one) for one in kept] == [InFile] * MOST_MEMORIES + [InMemory] * 2
    assert "4 times what was free in memory" in file.problem


def test_half_of_what_is_free_stays_free(file, monkeypatch):
    free = 10 * SIZE
    monkeypatch.setattr(spill, "_floors", {})
    monkeypatch.setattr(spill, "_free_bytes", lambda _: free - file.bytes)
    kept = [file.keep(storage(value)) for value in range(8)]
    assert [type(one) for one in kept] == [InFile] * 5 + [InMemory] * 3
    assert "half of what was free" in file.problem
    assert [set(one.storage.tolist()) for one in kept] == [{value} for value in range(8)]


def test_nothing_is_copied_for_one_who_wants_the_file_or_nothing(file, monkeypatch):
    kept = file.away(storage(1))
    assert type(kept) is InFile
    monkeypatch.setattr(spill, "_free_bytes", lambda _: 0)
    monkeypatch.setattr(spill, "InMemory", lambda _: pytest.fail("copied in memory"))
    assert file.away(storage(2)) is None
    assert "half of what was free" in file.problem


def test_a_write_that_fails_takes_no_room(file, monkeypatch):

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        assert type(file.keep(storage(1))) is InMemory
    assert "No space left" in file.problem
    assert file.bytes == 0
