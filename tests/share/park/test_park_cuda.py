"""Models on a GPU come back at their addresses: with a stand-in for CUDA's driver, and on a GPU.

The stand-in's device memory is memory of the host, so tensors in it are torch's CPU tensors;
everything between them and the driver's calls is what a GPU would use.
"""

import gc
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stand_in import OUT_OF_MEMORY, StandIn
from torch import nn

import memfit
from memfit import _native
from memfit.errors import ParkError, UsageError
from memfit.guard import overhead
from memfit.share.park import layout, parked
from memfit.share.park.cuda_memory import CudaMemory

MIB = 1 << 20


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Models on the CPU are parked as if it were a GPU."""
    stand_in = StandIn(tmp_path)
    stand_in.put_in(monkeypatch)
    yield stand_in
    stand_in.fail(0)
    gc.collect()
    assert stand_in.counts.misuses == 0


@pytest.fixture
def park(driver, tmp_path):
    assert driver.counts.held() == {}
    return partial(memfit.park, spill=tmp_path)


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5000, 128), nn.Linear(128, 128), nn.Linear(128, 5000, bias=False)
    )
    model[2].weight = model[0].weight
    model.register_buffer("scalar", torch.tensor(3.5))
    return model


def run(model, tokens):
    with torch.no_grad():  # a graph would hold the weights
        return model(tokens)


def state(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in tensors.items()}


def is_as_in(before, model):
    after = state(model)
    return before.keys() == after.keys() and all(
        before[name][0] == after[name][0] and torch.equal(before[name][1], after[name][1])
        for name in before
    )


@pytest.mark.parametrize("host", [0, "1MiB", "1GiB", None])
def test_a_model_comes_back_at_its_address_from_wherever_it_was_kept(park, driver, host):
    model, tokens = tied(), torch.arange(20)
    expected = run(model, tokens)
    parkable = park(model, host=host)
    assert parkable.is_parked
    assert driver.counts.used_bytes == 0
    with pytest.raises(ParkError, match=r"`0\.weight` was used while its model is parked"):
        model(tokens)
    parkable.wake()
    before = state(model)
    assert torch.equal(run(model, tokens), expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        parkable.park()
        parkable.wake()
    assert is_as_in(before, model)
    assert model[2].weight is model[0].weight
    model(tokens).sum().backward()
    optimizer.step()
    assert not is_as_in(before, model)
    after = state(model)
    with parkable:
        assert driver.counts.used_bytes == 0
    assert is_as_in(after, model)


def test_the_memory_of_the_device_is_exactly_the_models(park, driver):
    model = nn.Linear(1024, 9 * 1024, bias=False)  # 36 MiB: a chunk of 32 and one of 4
    parkable = park(model)
    assert driver.counts.held() == {
        "reservations": 1,
        "contexts": 1,
        "pinned_bytes": 36 * MIB,
    }
    before = overhead.in_use("cuda:0")
    parkable.wake()
    assert driver.counts.used_bytes == parkable.nbytes == 36 * MIB
    assert driver.counts.pinned_bytes == 0
    # A lease that gives way keeps it, though torch does not know of it.
    assert overhead.in_use("cuda:0") - before == 36 * MIB
    with parkable:
        assert overhead.in_use("cuda:0") == before
    del model, parkable
    gc.collect()
    assert driver.counts.held() == {}


def test_tensors_keep_the_memory_when_everything_else_is_gone(park, driver):
    model = nn.Linear(256, 256)
    parkable = park(model)
    parkable.wake()
    weight, expected = model.weight, model.weight.detach().clone()
    del model, parkable
    gc.collect()
    assert driver.counts.used_bytes == 2 * MIB
    assert torch.equal(weight, expected)
    del weight
    gc.collect()
    assert driver.counts.held() == {}


def test_what_the_host_may_not_keep_goes_to_the_disk_and_all_of_it_when_asked(park):
    model = nn.Linear(1024, 5 * 1024, bias=False)  # 20 MiB: five pieces
    parkable = park(model, host="9MiB")
    statistics = parkable.statistics
    assert (statistics.bytes_to_host, statistics.bytes_written) == (8 * MIB, 12 * MIB)
    parkable.to_disk()
    parkable.to_disk()
    assert parkable.statistics.bytes_written == 20 * MIB
    parkable.wake()
    parkable.to_disk()
    assert parkable.statistics.bytes_read == 20 * MIB
    parkable.park()
    assert parkable.statistics.bytes_unchanged == 12 * MIB
    assert parkable.host_bytes == 8 * MIB
    parkable.wake()
    assert parkable.host_bytes == 0
    parkable.park(host="5MiB")  # this time
    assert parkable.host_bytes == 4 * MIB
    parkable.close()
    parkable.to_disk()


def test_a_wake_without_room_leaves_the_model_parked_and_whole(park, driver):
    model = nn.Linear(1024, 9 * 1024, bias=False)
    expected = model.weight.detach().clone()
    parkable = park(model)
    driver.has(35 * MIB)
    for _ in range(2):
        with pytest.raises(
            ParkError, match=r"no memory to wake 36\.0 MiB .* no room for 4.0 MiB: 3.0 MiB is free"
        ) as caught:
            parkable.wake()
        assert caught.value.reason == "no_memory"
        assert parkable.is_parked
        assert driver.counts.used_bytes == 0
    driver.has(36 * MIB)
    parkable.wake()
    assert torch.equal(model.weight, expected)


def test_torchs_free_blocks_are_given_up_before_anyone_is_refused(park, driver, monkeypatch):
    model = nn.Linear(1024, 1024, bias=False)
    asked = []

    def release(device):
        asked.append(device)
        driver.has(4 * MIB)

    monkeypatch.setattr(overhead, "release", release)
    driver.has(2 * MIB)
    parkable = park(model)
    assert asked == ["cpu", "host"]  # for room, and at the end for what the model moved out of
    driver.has(2 * MIB)
    parkable.wake()
    assert asked == ["cpu", "host", "cpu"]


def test_whatever_call_fails_the_model_is_usable_and_nothing_is_lost(park, driver):
    tokens = torch.arange(20)
    for at in range(1, 100):
        model = tied()
        expected = run(model, tokens)
        driver.fail(at, OUT_OF_MEMORY if at % 2 else 700)
        try:
            parkable = park(model)
        except ParkError as error:
            reason, calls = error.reason, None
        else:
            reason, calls = "driver", driver.counts.calls
        driver.fail(0)
        assert reason in {"no_memory", "not_released", "driver"}
        if calls is None:
            assert torch.equal(run(model, tokens), expected)
            parkable = park(model)
        parkable.wake()
        assert torch.equal(run(model, tokens), expected)
        del model, parkable, expected
        gc.collect()
        assert driver.counts.held() == {}, at
        if calls is not None and calls < at:
            break
    else:
        pytest.fail("there is no end of calls")


def test_a_model_without_room_on_the_device_can_be_used_as_before(park, driver):
    model, tokens = tied(), torch.arange(20)
    expected = run(model, tokens)
    driver.has(1 * MIB)
    with pytest.raises(ParkError, match="device 0 has no room for") as caught:
        park(model)
    assert caught.value.reason == "no_memory"
    assert torch.equal(run(model, tokens), expected)
    del caught  # its traceback has the memory
    gc.collect()
    assert driver.counts.held() == {}


def test_a_device_without_the_means_is_refused(park, driver):
    driver.library.stand_in_set(1 << 30, 0, 1)
    with pytest.raises(ParkError, match="does not have virtual memory management") as caught:
        park(nn.Linear(4, 4))
    assert caught.value.reason == "driver"


def test_a_fork_neither_parks_nor_wakes(park):
    model = nn.Linear(8, 8)
    parkable = park(model)
    child = os.fork()
    if child == 0:
        try:
            parkable.wake()
        except ParkError as error:
            os._exit(0 if error.reason == "forked" else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    parkable.wake()


def test_a_range_that_is_not_taken_is_let_go(driver, tmp_path):
    memory = _native.ParkedCudaMemory(MIB, 0, tmp_path, allow_memory=True, driver=driver.path)
    assert memory.length == 2 * MIB
    capsules = [memory.tensor(0, 16), memory.tensor(2 * MIB - 1, 1)]
    for start, length in [(0, 2 * MIB + 1), (2 * MIB, 1), (2**64 - 1, 2)]:
        with pytest.raises(ParkError, match="there are no"):
            memory.tensor(start, length)
    del memory
    assert driver.counts.reservations == 1
    capsules.clear()
    assert driver.counts.held() == {}


def member(name, device):
    tensor = SimpleNamespace(device=torch.device(device), is_cuda=device.startswith("cuda"))
    return layout.Member(tensor, [name])


def test_an_optimizers_state_comes_and_goes_with_its_model(park, driver):
    def train(optimizer):
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    results = []
    for pause in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            train(optimizer)
            if pause:
                park(model, optimizer=optimizer).wake()
        results.append({**state(model), "moment": optimizer.state[model.weight]["exp_avg"]})
    assert driver.counts.used_bytes == 2 * MIB
    assert all(torch.equal(results[0][name][1], results[1][name][1]) for name in results[0])


def test_what_a_gpu_model_has_on_the_host_stays_there():
    on_gpu, on_host = member("weight", "cuda:0"), member("step of weight", "cpu")
    assert layout.together([on_host, on_gpu]) == [on_gpu]
    assert layout.together([on_host]) == [on_host]


def test_a_model_on_two_devices_is_refused_by_name():
    why = layout._elsewhere(member("bias", "cuda:1"), member("weight", "cuda:0"))
    assert why.startswith("it is on `cuda:1`, and `weight` on `cuda:0`: a parked model is on one")
    assert layout._elsewhere(member("bias", "cuda:0"), member("weight", "cuda:0")) is None


def test_what_a_gpu_model_cannot_have_is_refused(tmp_path):
    laid = [layout.Block(torch.zeros(4).untyped_storage())]
    with pytest.raises(ParkError, match="`source` is for models on the CPU") as caught:
        parked._memory_for(
            torch.device("cuda:0"), laid, str(tmp_path), "w", None, allow_memory=True
        )
    assert caught.value.reason == "unsupported"
    with pytest.raises(UsageError, match="cannot keep `-1` bytes"):
        memfit.park(nn.Linear(4, 4), tmp_path, host=-1)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_without_a_driver_its_library_is_named(tmp_path):
    with pytest.raises(ParkError, match=r"the CUDA driver `libcuda\.so\.1` cannot be opened") as at:
        CudaMemory(MIB, torch.device("cuda:0"), tmp_path, allow_memory=True)
    assert at.value.reason == "driver"


def test_the_stand_in_has_the_signatures_of_cudas_header(tmp_path):
    found = find_spec("nvidia")
    folders = [Path(folder) for folder in found.submodule_search_locations] if found else []
    headers = [header.parent for folder in folders for header in folder.glob("*/include/cuda.h")]
    if not headers:
        pytest.skip("needs CUDA's header, which comes with torch for CUDA")
    StandIn(tmp_path, "-Wall", "-Werror", "-DSTAND_IN_WITH_CUDA_H", f"-I{headers[0]}")


def large():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()  # 512 MiB


@pytest.mark.gpu
def test_a_gpus_memory_is_returned_and_taken_again_at_the_same_addresses(tmp_path):
    model = large()
    inputs = torch.randn(64, 4096, device="cuda")
    with torch.no_grad():
        expected = model(inputs)
        parkable = parked.ParkedModel(model, tmp_path, allow_memory=True)
        parkable.park()
        parkable.wake()
        before = state(model)
        assert torch.equal(model(inputs), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(inputs)
        graph.replay()
        replayed = output.clone()
    taken = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(2):
        torch.cuda.synchronize()
        awake_free = torch.cuda.mem_get_info()[0]
        parkable.park()
        parked_free = torch.cuda.mem_get_info()[0]
        assert abs((parked_free - awake_free) / taken - 1) <= 0.01
        parkable.wake()
        assert abs((parked_free - torch.cuda.mem_get_info()[0]) / taken - 1) <= 0.01
        assert is_as_in(before, model)
        assert torch.equal(run(model, inputs), expected)
        output.zero_()
        graph.replay()
        assert torch.equal(output, replayed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs).sum().backward()
    optimizer.step()
    assert not is_as_in(before, model)


@pytest.mark.gpu
def test_a_wake_without_room_on_a_gpu_rolls_back(tmp_path):
    model = large()
    parkable = parked.ParkedModel(model, tmp_path, allow_memory=True)
    parkable.park()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free_bytes - 128 * MIB, dtype=torch.uint8, device="cuda")
    left_bytes, _ = torch.cuda.mem_get_info()
    with pytest.raises(ParkError) as caught:
        parkable.wake()
    assert caught.value.reason == "no_memory"
    assert parkable.is_parked
    assert torch.cuda.mem_get_info()[0] == left_bytes
    del hog
    parkable.wake()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
