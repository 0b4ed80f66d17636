"""What a script loads, in mapped files: the same results in less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ran import in_processes, inline
from torch import Tensor, nn

from memfit import _native
from memfit.run.script.held_in_files import HeldInFiles
from memfit.run.script.loaded import LOADED_IN_FILES, LoadCall, loadable_bytes

MIB = 1 << 20

TRAINS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(steps):
        for _ in range(steps):
            loss = model(torch.rand(16, 512)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))

    def save():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""

READS_AT_THE_END = """
    train(4)
    save()
    last = torch.load("last.pt")
    model.load_state_dict(last["model"])
    print(repr(sum(it.double().sum().item() for it in model.parameters())))
"""

RESUMES = """
    train(4)
    save()
    last = torch.load("last.pt", map_location="cpu")
    model.load_state_dict(last["model"])
    optimizer.load_state_dict(last["optimizer"])
    train(3)
    save()
    train(2)
    print(repr(sum(it.double().sum().item() for it in last["model"].values())))
    del last
    train(2)
    save()
"""


def test_a_checkpoint_that_is_read_takes_no_memory(tmp_path: Path):
    """Model and state of 8 MiB each, and a checkpoint of both."""
    ran = inline(tmp_path, "26MiB", TRAINS + READS_AT_THE_END, offload="chosen")
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert LOADED_IN_FILES in ran.loops[0]["notes"]


def test_what_torch_has_not_imported_yet_is_no_failure(tmp_path: Path):
    """Reading comes first, in a new process: nothing has imported torch's settings of it."""
    torch.save(nn.Linear(512, 512).state_dict(), tmp_path / "first.pt")
    code = """
    import sys, torch
    from torch import nn

    model = nn.Linear(512, 512)
    model.load_state_dict(torch.load(sys.argv[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(16, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    ran = inline(
        tmp_path, "26MiB", code, str(tmp_path / "first.pt"), ways=in_processes, offload="chosen"
    )
    assert ran.fitting["refusal"] is None
    assert len(ran.loops) == 1


def test_what_is_resumed_from_may_be_written_over(tmp_path: Path):
    ran = inline(tmp_path, "30MiB", TRAINS + RESUMES, offload="chosen")
    assert LOADED_IN_FILES in ran.loops[0]["notes"]


def test_without_leave_to_offload_it_is_in_memory(tmp_path: Path):
    ran = inline(tmp_path, "26MiB", TRAINS + READS_AT_THE_END, "--no-offload")
    assert LOADED_IN_FILES not in ran.loops[0]["notes"]


def is_counted(tensor: Tensor) -> bool:
    return _native.is_counted(tensor.data_ptr())


def loaded(path: Path, held: HeldInFiles) -> dict[str, Tensor]:
    call = LoadCall(path, None, None, str(path.parent))
    result: dict[str, Tensor] = torch.load(path, map_location=call.restored)
    held.loaded(call.mapped)
    return result


def test_what_shares_memory_is_in_memory_that_it_shares(tmp_path: Path, held: HeldInFiles):
    weight = torch.arange(1 << 16, dtype=torch.float32)
    saved = {"own": weight.clone(), "tied": weight, "view": weight[: 1 << 10], "small": weight[:8]}
    torch.save(
        {key: it.clone() if key == "small" else it for key, it in saved.items()}, tmp_path / "a"
    )
    found = loaded(tmp_path / "a", held)
    counted = {key: is_counted(it) for key, it in found.items()}
    assert counted == {"own": False, "tied": True, "view": True, "small": True}
    for key, it in saved.items():
        assert torch.equal(found[key], it)
    found["tied"][0] = 7.0
    assert found["view"][0] == 7.0


def test_small_tensors_stay(tmp_path: Path, held: HeldInFiles):
    torch.save(torch.ones(8), tmp_path / "a")
    call = LoadCall(tmp_path / "a", None, None, str(tmp_path))
    assert is_counted(torch.load(tmp_path / "a", call.restored))
    held.loaded(call.mapped)
    assert held.count == 0


def test_what_is_written_is_in_memory_again(tmp_path: Path, held: HeldInFiles):
    torch.save({"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}, tmp_path / "a")
    found = loaded(tmp_path / "a", held)
    assert [is_counted(it) for it in found.values()] == [False, False]
    found["a"] += 1
    held.place(1, [], ())
    assert [is_counted(it) for it in found.values()] == [True, False]
    assert found["a"].unique().tolist() == [2.0]


@pytest.mark.parametrize("assign", [False, True])
def test_what_an_optimizer_writes_is_in_memory(tmp_path: Path, held: HeldInFiles, *, assign: bool):
    parameter = nn.Parameter(torch.ones(1 << 18))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(1 << 18)
    optimizer.step()
    torch.save({"weight": parameter.detach(), "state": optimizer.state_dict()}, tmp_path / "a")
    found = loaded(tmp_path / "a", held)
    assert not is_counted(found["weight"])
    again = nn.Parameter(found["weight"]) if assign else parameter
    resumed = torch.optim.SGD([again], lr=0.1, momentum=0.9)
    held.optimizer_made(resumed)
    resumed.load_state_dict(found["state"])
    held.state_loaded(resumed)
    assert is_counted(again)
    assert is_counted(resumed.state[again]["momentum_buffer"])
    assert is_counted(found["weight"]) == assign
    if assign:
        with torch.no_grad():
            again.zero_()
        assert not found["weight"].any()


def test_what_a_loaded_optimizer_writes_is_in_memory(tmp_path: Path, held: HeldInFiles):
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    torch.save((model, optimizer, torch.ones(1 << 16)), tmp_path / "a")
    call = LoadCall(tmp_path / "a", None, None, str(tmp_path))
    found, own, other = torch.load(tmp_path / "a", call.restored, weights_only=False)
    held.loaded(call.mapped)
    assert is_counted(found.weight)
    assert is_counted(own.state[found.weight]["momentum_buffer"])
    assert not is_counted(other)


def test_what_is_read_as_ever(tmp_path: Path):
    tensors = {"a": torch.ones(1 << 16)}
    torch.save(tensors, tmp_path / "new")
    torch.save(tensors, tmp_path / "old", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script")
    assert loadable_bytes(tmp_path / "new", None, mmap=None) >= 1 << 18
    assert loadable_bytes(str(tmp_path / "new"), torch.device("cpu"), mmap=False) >= 1 << 18
    assert loadable_bytes(tmp_path / "new", None, mmap=True) == 0
    assert loadable_bytes(tmp_path / "new", {"cuda:0": "cpu"}, mmap=None) == 0
    for name in ("old", "script", "missing"):
        assert loadable_bytes(tmp_path / name, None, mmap=None) == 0
    with (tmp_path / "new").open("rb") as file:
        assert loadable_bytes(file, None, mmap=None) == 0
