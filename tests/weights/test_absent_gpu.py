"""Targets written for CUDA, on a machine without: captured as if they had named no device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memfit import Trace, _native, predict
from memfit.errors import CaptureError, WorkloadError
from memfit.program.host import Host
from memfit.weights.absent_gpu import pretended_gpu
from memfit.weights.one_device import SeveralDevicesError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

TARGETS = """
import io

import torch
from torch import nn
import memfit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def workload(model, batch, loss=lambda m, b: m(b).square().mean()):
    adam = lambda p: torch.optim.Adam(p)
    return memfit.Workload(model, batch, loss, adam)

def net(**place):
    return nn.Sequential(nn.Linear(64, 128, **place), nn.ReLU(), nn.Linear(128, 64, **place))

def plain():
    return workload(net(), torch.randn(16, 64))

def called():
    torch.cuda.set_device(0)
    return workload(net().cuda(), torch.randn(16, 64).pin_memory().cuda(0, non_blocking=True))

def named():
    batch = torch.randn(16, 64, device="cuda:0")
    return workload(net().to("cuda"), batch, lambda m, b: m(b.cuda()).square().mean())

def placed():
    return workload(net(device="cuda"), torch.randn(16, 64).to(device=torch.device("cuda", 0)))

def inside():
    with torch.device("cuda"):
        return workload(net(), torch.randn(16, 64))

def guarded():
    def loss(m, b):
        assert torch.cuda.is_available() == (DEVICE.type == "cuda")
        return (m(b) * torch.ones((), device=DEVICE)).square().mean()
    return workload(net().to(DEVICE), torch.randn(16, 64, device=DEVICE), loss)

def accelerated():
    there = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if there else "cpu"
    return workload(net().to(device), torch.randn(16, 64).to(device))

def by_default():
    torch.set_default_device("cuda")
    try:
        return workload(net(), torch.randn(16, 64))
    finally:
        torch.set_default_device(None)

def asserted():
    with torch.cuda.device(0):
        model = net().cuda()
    print(torch.cuda.get_device_properties(0).total_memory, torch.cuda.mem_get_info())
    place = next(model.parameters()).device
    batch = torch.randn(16, 64).to(place).float()
    assert place.type == "cuda" and batch.is_cuda and not batch.cpu().is_cuda
    assert not torch.zeros(2).is_cuda and not torch.zeros(2).copy_(batch[0, :2]).is_cuda
    return workload(model, batch)

def loaded():
    saved = io.BytesIO()
    torch.save(net().state_dict(), saved)
    model = net().cuda()
    model.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), map_location="cuda"))
    return workload(model, torch.randn(16, 64).cuda())

def off(m, batch):
    return (m(batch[0]) - batch[1].view(16, 64)).square().mean()

def given(device="cuda"):
    batch = torch.randn(16, 64, device=device), torch.randn(1024, device=device)
    return workload(net().to(device), batch, off)

def held(device="cuda"):
    given, wanted = torch.randn(16, 64, device=device), torch.randn(1024, device=device)
    return workload(net().to(device), (given,), lambda m, b: off(m, (b[0], wanted)))

def held_on_the_cpu():
    return held("cpu")

def data():
    table = torch.randn(1 << 18, 64)
    rows = torch.randint(0, 1 << 18, (16,))
    return workload(net().cuda(), rows, lambda m, b: m(table[b].cuda()).square().mean())

def two():
    return workload(nn.Sequential(net().cuda(0), net().to("cuda:1")), torch.randn(16, 64).cuda())

def second():
    return workload(net().to(1), torch.randn(16, 64).to("cuda:1"))

def spread():
    model = net()
    model.hf_device_map = {"0": 0, "2": 1}
    return workload(model, torch.randn(16, 64))

def moves():
    return workload(net(), torch.randn(16, 64), lambda m, b: m(b).to("cuda:1").square().mean())

def streams():
    torch.cuda.Stream()

def fails():
    net().cuda()
    raise ValueError("of its own")
"""


@pytest.fixture
def captured(tmp_path: Path):
    """Captures a function of the targets, as the program does."""
    file = tmp_path / "targets_for_cuda.py"
    file.write_text(TARGETS)

    def capture(name: str, device: str | None) -> tuple[str, int]:
        host, target = Host(), f"{file}:{name}"
        host.build(target, [], device)
        trace = _native.Trace.decode(host.capture(target, [], device))
        kind = json.loads(trace.json())["meta"]["device_kind"]
        return kind, predict(Trace(trace)).predicted_peak_bytes

    return capture


@pytest.mark.parametrize(
    "name",
    ["called", "named", "placed", "inside", "accelerated", "by_default", "asserted", "loaded"],
)
def test_a_target_that_asks_for_a_gpu_takes_what_it_takes_there(captured, name):
    expected = captured("plain", "cuda")
    assert expected[0] == "cuda"
    assert captured(name, "cuda") == expected
    asks_by_itself = name != "accelerated"
    assert captured(name, None)[0] == ("cuda" if asks_by_itself else "cpu")


@pytest.mark.parametrize(("name", "device"), [("held", None), ("held_on_the_cpu", "cuda")])
def test_what_a_loss_holds_is_where_the_batch_would_be(captured, name, device):
    assert captured(name, device) == captured("given", "cuda")


def test_data_that_stays_on_the_cpu_takes_no_memory_of_the_gpu(captured):
    kind, peak_bytes = captured("data", None)
    assert kind == "cuda"
    assert peak_bytes < 1 << 20


def test_libraries_that_look_for_triton_can_be_imported_meanwhile():
    """As torchao does, and transformers imports that."""
    with pretended_gpu():
        from torch.utils._triton import has_triton

        assert torch.cuda.is_available()
        assert not has_triton()


def test_a_guard_follows_the_device_that_is_asked_for(captured):
    assert [captured("guarded", device)[0] for device in (None, "cpu", "cuda")] == [
        "cpu",
        "cpu",
        "cuda",
    ]


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("name", ["two", "spread"])
def test_several_gpus_are_refused_by_name(captured, name, device):
    with pytest.raises(
        SeveralDevicesError, match=r"one device today.*`cuda:0`, `cuda:1`"
    ) as refused:
        captured(name, device)
    assert "--device cuda" in refused.value.__notes__[0]


def test_one_gpu_may_have_any_index(captured):
    assert captured("second", None) == captured("plain", "cuda")


def test_a_step_that_moves_on_is_refused(captured):
    with pytest.raises(SeveralDevicesError, match="the step asks for `cuda:0`, `cuda:1`"):
        captured("moves", "cuda")
    with pytest.raises(CaptureError, match="on the CPU and makes tensors on `cuda:1`") as refused:
        captured("moves", None)
    assert "`--device cuda`" in refused.value.__notes__[0]


@pytest.mark.parametrize("device", [None, "cuda"])
def test_what_only_a_gpu_has_is_explained(captured, device):
    with pytest.raises(WorkloadError) as failed:
        captured("streams", device)
    (hint,) = failed.value.__notes__
    assert hint.startswith("there is no GPU here")
    assert "`--device cuda`" in hint


def test_nothing_of_it_stays(captured):
    available = torch.cuda.is_available
    with pytest.raises(WorkloadError) as failed:
        captured("fails", None)
    assert str(failed.value.__cause__) == "of its own"
    assert torch.cuda.is_available is available
    assert not torch.cuda.is_available()
    assert torch.zeros(1).device.type == "cpu"
