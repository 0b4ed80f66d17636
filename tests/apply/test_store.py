"""The native store: bytes out and back, and every way that can fail or be cut short."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from forks import FORKS, Done

from memfit._native import Store, StoredBlock
from memfit.errors import OffloadError, UsageError

MIB = 1 << 20
IN_MEMORY = "/dev/shm"  # noqa: S108 - it is to be refused


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, 4 * MIB, allow_memory=True)


def send(store: Store, tensor: torch.Tensor) -> StoredBlock:
    storage = tensor.untyped_storage()
    return store.write((storage.data_ptr(), storage.nbytes()), storage)


def fetch(block: StoredBlock, like: torch.Tensor) -> torch.Tensor:
    back = torch.empty_like(like)
    block.fetch((back.data_ptr(), back.nbytes))
    return back


def run_alone(code: str, folder: Path) -> Done:
    """Run code in a process of its own, with `store`'s module imported."""
    prelude = "import os, sys, torch\nfrom memfit._native import Store\n"
    return FORKS.run("-c", prelude + textwrap.dedent(code), folder)


def test_tensors_come_back_as_they_were(store):
    tensors = [torch.randn(size) for size in (0, 1, 1000, 300_000, 2_000_000)]
    blocks = [send(store, tensor) for tensor in tensors]
    for block, tensor in zip(reversed(blocks), reversed(tensors), strict=True):
        block.settle()
        assert torch.equal(fetch(block, tensor), tensor)
        ahead = torch.empty_like(tensor)
        block.prefetch((ahead.data_ptr(), ahead.nbytes), ahead.untyped_storage())
        block.wait()
        assert torch.equal(ahead, tensor)
    statistics = store.statistics()
    total = sum(tensor.nbytes for tensor in tensors)
    assert statistics["bytes_written"] == total
    assert statistics["bytes_read"] == 2 * total
    assert statistics["seconds_busy"] > 0
    assert statistics["peak_in_flight_bytes"] <= 8_000_000 + 4 * MIB
    assert statistics["file_bytes"] >= total


def test_the_owner_is_held_until_the_transfer_ended_and_no_longer(store):
    tensor = torch.randn(100_000)
    storage = tensor.untyped_storage()
    holders = sys.getrefcount(storage)
    block = store.write((storage.data_ptr(), storage.nbytes()), storage)
    assert sys.getrefcount(storage) == holders + 1
    block.settle()
    assert sys.getrefcount(storage) == holders
    block.prefetch((storage.data_ptr(), storage.nbytes()), storage)
    assert sys.getrefcount(storage) == holders + 1
    del block
    assert sys.getrefcount(storage) == holders


def test_misuse_is_refused(store, tmp_path):
    tensor = torch.randn(10)
    block = send(store, tensor)
    with pytest.raises(OffloadError, match="block of 40 bytes cannot be fetched into 36"):
        block.fetch((tensor.data_ptr(), 36))
    with pytest.raises(OffloadError, match="was not fetched ahead"):
        block.wait()
    with pytest.raises(UsageError, match="no memory at that address"):
        store.write((0, 40), tensor)
    block.forget()
    with pytest.raises(OffloadError, match="was forgotten"):
        block.settle()
    with pytest.raises(OffloadError, match=r"no folder `.*gone` to write"):
        Store(tmp_path / "gone", 0)
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="file` is no folder"):
        Store(tmp_path / "file", 0)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder nobody can write to")
def test_a_folder_that_cannot_be_written_to_is_named():
    with pytest.raises(OffloadError, match="cannot write to the folder `/proc/self`"):
        Store("/proc/self", 0)


@pytest.mark.skipif(not os.access(IN_MEMORY, os.W_OK), reason="needs a folder in memory")
def test_a_folder_in_memory_is_refused():
    with pytest.raises(OffloadError, match="on tmpfs, which keeps its files in memory"):
        Store(IN_MEMORY, 0)


def test_a_folder_that_vanishes_is_no_loss(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    store = Store(folder, MIB, allow_memory=True)
    tensor = torch.randn(1000)
    block = send(store, tensor)
    folder.rmdir()  # empty: the file has no name
    again = send(store, tensor)
    assert torch.equal(fetch(block, tensor), tensor)
    assert torch.equal(fetch(again, tensor), tensor)


def test_nothing_is_left_open(tmp_path):
    before = set(Path("/proc/self/fd").iterdir())
    store = Store(tmp_path, MIB, allow_memory=True)
    block = send(store, torch.randn(1000))
    del store
    block.settle()
    del block
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_nothing_is_left_after_a_kill_in_the_middle_of_a_transfer(tmp_path):
    done = run_alone(
        """
        store = Store(sys.argv[1], 1 << 30, allow_memory=True)
        storage = torch.ones(1 << 24).untyped_storage()
        blocks = [store.write((storage.data_ptr(), storage.nbytes()), storage) for _ in range(4)]
        os.kill(os.getpid(), 9)
        """,
        tmp_path,
    )
    assert done.code == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_grow_is_an_error_of_its_write(tmp_path):
    done = run_alone(
        f"""
        import resource
        from memfit.errors import OffloadError
        store = Store(sys.argv[1], {MIB}, allow_memory=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {resource.RLIM_INFINITY}))
        kept, large = torch.ones(1000), torch.ones(1 << 20)
        first = store.write((kept.data_ptr(), kept.nbytes), kept)
        second = store.write((large.data_ptr(), large.nbytes), large)
        for _ in range(2):
            try:
                second.settle()
            except OffloadError as error:
                print(error)
        first.fetch((large.data_ptr(), kept.nbytes))
        print(torch.equal(large[:1000], kept))
        """,
        tmp_path,
    )
    assert done.stderr == ""
    first, second, whole = done.stdout.splitlines()
    assert first == second
    assert first.startswith("writing 4.0 MiB of offloaded tensors in")
    assert "too large" in first
    assert whole == "True"


def test_a_full_disk_is_an_error_of_its_write(tmp_path):
    private = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=2m", "memfit", tmp_path]
    if shutil.which("unshare") is None or subprocess.run(private, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    code = """
    import subprocess
    from memfit.errors import OffloadError
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "memfit", sys.argv[1]]
    subprocess.run(mount, check=True)
    store = Store(sys.argv[1], 1 << 20, allow_memory=True)
    tensors = [torch.ones(1 << 18) * i for i in range(3)]
    blocks = [store.write((t.data_ptr(), t.nbytes), t) for t in tensors]
    for block in blocks:
        try:
            block.settle()
        except OffloadError as error:
            print(error)
    back = torch.empty(1 << 18)
    blocks[1].fetch((back.data_ptr(), back.nbytes))
    print(torch.equal(back, tensors[1]))
    """
    prelude = "import os, sys, torch\nfrom memfit._native import Store\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--mount", *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr == ""
    assert "no space in" in done.stdout
    assert "1.0 MiB (1048576 bytes) of offloaded tensors: 0 B (0 bytes) are free" in done.stdout
    assert done.stdout.count("no space in") == 1
    assert done.stdout.endswith("True\n")


def test_a_fork_says_that_the_store_is_its_parents(tmp_path):
    done = run_alone(
        """
        from memfit.errors import OffloadError
        store = Store(sys.argv[1], 1 << 20, allow_memory=True)
        tensor = torch.ones(1000)
        block = store.write((tensor.data_ptr(), tensor.nbytes), tensor)
        if os.fork() == 0:
            for use in (block.settle, lambda: store.write((tensor.data_ptr(), 4000), tensor)):
                try:
                    use()
                except OffloadError as error:
                    print(str(error).splitlines()[0], flush=True)
            del block, store, use
            print("the child ends", flush=True)
            sys.exit(0)
        os.wait()
        block.settle()
        print("the parent goes on")
        """,
        tmp_path,
    )
    assert done.stderr == ""
    *told, child, parent = done.stdout.splitlines()
    assert len(told) == 2
    assert all("this is a fork of it" in line for line in told)
    assert (child, parent) == ("the child ends", "the parent goes on")


def test_ctrl_c_ends_a_wait_and_memory_is_held_until_the_transfer_ended(tmp_path):
    store = Store(tmp_path, 4 << 30, allow_memory=True)
    # 1 GiB takes longer to write than questions for a signal are apart (50 ms), on a fast disk too.
    storage = torch.ones(1 << 28).untyped_storage()
    holders = sys.getrefcount(storage)

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    def wait(block):
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # here: on a busy machine it may come at once
        block.settle()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for tries in range(1, 11):  # on a busy machine an alarm may come when all is written
            block = store.write((storage.data_ptr(), storage.nbytes()), storage)
            with pytest.raises(KeyboardInterrupt):
                wait(block)
            held = sys.getrefcount(storage)
            is_under_way = store.statistics()["bytes_written"] < tries * storage.nbytes()
            if is_under_way:
                break
            block = None
        assert is_under_way
        assert held == holders + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    block = None  # waits
    assert sys.getrefcount(storage) == holders
    assert store.statistics()["bytes_written"] == tries * storage.nbytes()
