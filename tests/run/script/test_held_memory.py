"""Tensors that share memory, and what others do to it while it goes to a file: the same results."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ran import inline
from test_held_in_files import is_mapped, large, place
from torch import Tensor, nn

from memfit import _native
from memfit.apply.offload import views
from memfit.run.script.held_in_files import HELD_IN_FILES, HeldInFiles


class Parts:
    """A data set and its parts, in one memory."""

    def __init__(self, kind: str) -> None:
        whole = torch.rand(1 << 10, 1 << 8)
        self.known = whole.clone()
        if kind in ("hidden", "split"):
            self.parts = (
                list(whole.split(256)) if kind == "split" else [whole.view(-1)[:-1], whole.t()]
            )
        elif kind == "detached":
            self.parts = [whole, whole.detach()[1:], whole.data, whole[2:].detach()]
        elif kind == "without gradients":
            with torch.no_grad():
                self.parts = [whole, whole[1:], whole.unsqueeze(0)]
        elif kind == "parameter":
            self.parts = [nn.Parameter(whole), whole[:-1]]
        else:
            assert kind == "of views"
            self.parts = [whole[1:][1:], whole.view(torch.int32)]

    def is_as_known(self) -> bool:
        """Whether each has the bytes of where it lies in the whole."""
        whole = self.known
        for it in self.parts:
            with torch.no_grad():
                seen = it.view(torch.float32) if it.dtype is torch.int32 else it
                expected = whole.as_strided(seen.size(), seen.stride(), seen.storage_offset())
                if not torch.equal(seen, expected):
                    return False
        return len({it.untyped_storage()._cdata for it in self.parts}) == 1


@pytest.mark.parametrize(
    "kind", ["hidden", "split", "detached", "without gradients", "parameter", "of views"]
)
def test_what_shares_memory_goes_and_comes_back_together(held: HeldInFiles, kind: str):
    it = Parts(kind)
    before = [(one._base, one._version, one.stride()) for one in it.parts]
    live = _native.counted_bytes()
    for _ in range(2):
        place(held)
        assert all(map(is_mapped, it.parts))
        assert live - _native.counted_bytes() >= it.known.nbytes
        assert it.is_as_known()
    for (base, version, strides), one in zip(before, it.parts, strict=True):
        assert one._base is base
        assert (one._version, one.stride()) == (version, strides)
    del before, base, one
    last = it.parts[-1]
    with torch.no_grad():
        last.view(torch.float32).zero_() if last.dtype is torch.int32 else last.zero_()
        it.known.as_strided(last.size(), last.stride(), last.storage_offset()).zero_()
    assert it.is_as_known()
    place(held)
    assert not any(map(is_mapped, it.parts))
    assert it.is_as_known()
    first = it.parts[0]
    with torch.no_grad():
        first.add_(1)
        it.known.as_strided(first.size(), first.stride(), first.storage_offset()).add_(1)
    assert it.is_as_known()


def test_parts_of_what_torch_has_read_go_and_come_back_to_be_trained(
    held: HeldInFiles, tmp_path: Path
):
    torch.save([large(), large()], tmp_path / "saved.pt")
    read, hidden = torch.load(tmp_path / "saved.pt")
    parts = [read, read[7:], read.view(256, 256), hidden.view(256, 256)[1:]]
    del hidden
    known = [it.clone() for it in parts]
    place(held)
    assert all(map(is_mapped, parts))
    weights = [nn.Parameter(parts[2]), nn.Parameter(parts[3])]
    held.optimizer_made(torch.optim.SGD(weights, 0.1))
    assert not any(map(is_mapped, parts))
    assert all(torch.equal(it, one) for it, one in zip(parts, known, strict=True))
    assert weights[0].data_ptr() == read.data_ptr()
    assert weights[1].data_ptr() == parts[3].data_ptr()


def test_a_part_that_is_trained_or_seen_keeps_the_whole(held: HeldInFiles):
    trained, shown, computed = large(), large(), large()
    weight = nn.Parameter(trained[1:])
    optimizer = torch.optim.SGD([weight], 0.1)
    array = shown[1:].numpy()
    leaf = nn.Parameter(torch.ones(1))
    of_graph = computed[1:].mul_(leaf)
    alone = large()
    place(held)
    assert is_mapped(alone)
    assert not any(map(is_mapped, (trained, shown, computed)))
    shown.fill_(7)
    assert (array == 7).all()
    del optimizer, of_graph


def test_a_batch_that_is_a_part_of_the_data_does_not_keep_it(held: HeldInFiles):
    data = large().view(256, 256)
    for step in range(4):
        batch = data[step * 64 : (step + 1) * 64]
        place(held, batch)
        assert is_mapped(data)
        assert batch.data_ptr() == data[step * 64 :].data_ptr()
    data[0] = 7
    batch = data[:64]
    place(held, batch)
    assert not is_mapped(data)
    assert batch.data_ptr() == data.data_ptr()
    assert (batch[0] == 7).all()


def test_a_part_that_is_held_and_passes_goes_after_a_step(held: HeldInFiles):
    part, other = large()[1:], large()
    place(held, part)
    assert is_mapped(other)
    assert not is_mapped(part)
    place(held, part)
    assert is_mapped(part)


def test_what_goes_while_a_model_infers_can_be_trained_and_written_later(held: HeldInFiles):
    """In `torch.inference_mode()` torch makes no views, and tensors that nothing may train."""
    whole, weight = large(), nn.Parameter(large())
    part = whole[1:]
    with torch.inference_mode():
        place(held)
    assert all(map(is_mapped, (whole, weight)))
    assert not any(it.is_inference() for it in (whole, part, weight))
    whole.mul_(2)
    (weight * whole).sum().backward()
    assert torch.equal(weight.grad, whole)
    weight.grad = None
    with torch.inference_mode():
        place(held)
    assert not is_mapped(whole)
    assert not whole.is_inference()
    assert torch.equal(part, whole[1:])


def test_tensors_see_one_memory_though_one_of_them_refuses(
    held: HeldInFiles, monkeypatch: pytest.MonkeyPatch
):
    exchange, seen = views.exchange_memory, []

    def refusing(tensor: Tensor, storage: torch.UntypedStorage) -> None:
        seen.append(tensor)
        if len(seen) == 2:
            raise RuntimeError("it refuses")
        exchange(tensor, storage)

    whole = large()
    parts = [whole, whole[1:], whole[2:]]
    monkeypatch.setattr(views, "exchange_memory", refusing)
    assert not place(held)
    assert len(seen) == 4
    assert not any(map(is_mapped, parts))
    assert len({it.untyped_storage()._cdata for it in parts}) == 1


def test_a_batch_of_its_own_stays_however_it_is_shaped(held: HeldInFiles):
    for _ in range(4):
        batch = large().view(256, 256)
        place(held, batch)
        assert not is_mapped(batch)
        del batch


def test_the_halves_of_a_data_set_leave_room_for_the_step(tmp_path: Path):
    """16 MiB of data, of which both halves have names and their base has none, and steps of 18."""
    (tmp_path / "disk").mkdir()
    ran = inline(
        tmp_path,
        "24MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    train, val = torch.rand(4096, 1024).split([3584, 512])
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(7):
        data = train[step * 512 : (step + 1) * 512]
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    print(repr(val.sum().item()))
    """,
        offload=str(tmp_path / "disk"),
    )
    (loop,) = ran.loops
    assert HELD_IN_FILES in loop["notes"]
    assert ran.report["fitting"]["verdict"]["kept"], ran.stderr


class Writer(threading.Thread):
    """Another thread, which writes to what it is given in turn, and waits in between."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.given: queue.Queue[Tensor | None] = queue.Queue()

    def run(self) -> None:
        while (tensor := self.given.get()) is not None:
            tensor.data.add_(1)
            self.given.task_done()

    def write(self, tensor: Tensor) -> None:
        self.given.put(tensor)
        self.given.join()


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_another_thread_writes_while_it_goes_is_there(
    held: HeldInFiles, monkeypatch: pytest.MonkeyPatch, *, comes_back: bool
):
    """A replay memory that an actor's thread fills: what it writes after the copy was lost."""
    monkeypatch.undo()
    whole = large()
    expected = whole + 1
    writer = Writer()
    writer.start()
    for name in ("in_memory", "in_file"):
        copied = getattr(views, name)

        def copying(storage: Any, *place: str, copied: Any = copied) -> Any:
            there = copied(storage, *place)
            if writes:
                writer.write(writes.pop())
            return there

        monkeypatch.setattr(views, name, copying)
    writes = [] if comes_back else [whole]
    place(held)
    assert is_mapped(whole) == comes_back
    if comes_back:
        whole.add_(1)
        expected += 1
        writes = [whole]
        place(held)
        assert is_mapped(whole)
    assert torch.equal(whole, expected)
    place(held)
    assert is_mapped(whole) != comes_back
    assert torch.equal(whole, expected)
    writer.given.put(None)


def test_nothing_goes_while_another_thread_may_be_in_an_op(
    held: HeldInFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    is_over, has_begun = threading.Event(), threading.Event()

    def works() -> None:
        numbers = torch.zeros(8)
        while not is_over.is_set():
            numbers.add_(1)
            has_begun.set()

    worker = threading.Thread(target=works)
    worker.start()
    has_begun.wait()
    whole, found = large(), []
    for _ in range(20):
        place(held)
        found.append(is_mapped(whole))
    is_over.set()
    worker.join()
    place(held)
    assert not any(found)
    assert is_mapped(whole)


REPLAY = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(model.parameters())
    memory = []
    for episode in range(24):
        loss = model(torch.randn(256, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.append(torch.randn(2048, 128))
        print(repr(loss.item()))
"""


def test_what_grows_is_said_to_grow_though_it_goes_to_files(tmp_path: Path):
    ran = inline(tmp_path, "12MiB", REPLAY, offload=str(tmp_path))
    assert HELD_IN_FILES in ran.loops[0]["notes"], ran.stderr
    steps = ran.report["steps"]
    assert steps["growth_bytes_per_step"] > 1 << 19
    assert "`memory`" in steps["growth_cause"]
