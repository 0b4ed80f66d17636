"""Pools of models on a GPU: with a stand-in for CUDA's driver, and on a GPU.

The stand-in's device memory is memory of the host, so tensors in it are torch's CPU tensors; what a
pool counts, moves and refuses is what it would be on a GPU.
"""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from stand_in import OUT_OF_MEMORY, StandIn
from torch import nn

import memfit
from memfit import _native
from memfit.errors import ParkError, PoolError, UsageError
from memfit.guard import overhead
from memfit.share.park import layout
from memfit.share.pool import device as pool_device

MIB = 1 << 20
MODEL = 8 * MIB
PIECE = 4 * MIB


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(1024, 2048, bias=False)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Models on the CPU count as models on ``cuda:0``, and lie in the stand-in's memory."""
    stand_in = StandIn(tmp_path)
    stand_in.put_in(monkeypatch)
    yield stand_in
    stand_in.fail(0)
    gc.collect()
    assert stand_in.counts.misuses == 0


@pytest.fixture
def make(driver, tmp_path):
    """Pools on the stand-in's device, whose peaks count from when they are full."""

    def pool(budget, names="", host="1GiB", **options):
        made = memfit.Pool(
            budget, tmp_path / "parked", device="cuda:0", host=host, allow_memory=True
        )
        for seed, name in enumerate(names):
            made.add(name, linear(seed), **options)
        driver.peaks()
        return made

    return pool


@pytest.fixture
def released(monkeypatch):
    """The devices whose free blocks torch was told to give back."""
    asked = []
    monkeypatch.setattr(overhead, "release", asked.append)
    return asked


def used(pool, name, **options):
    with pool.use(name, **options):
        pass


@pytest.mark.parametrize("host", [0, "12MiB", "1GiB"])
def test_models_come_back_at_their_addresses_with_equal_bits(make, driver, host):
    pool = make("16MiB", "abcd", host=host)
    places = {}
    for name in "abcdabcdaabbccdd":
        with pool.use(name) as model:
            assert torch.equal(model.weight, linear("abcd".index(name)).weight)
            address = model.weight.data_ptr()
            assert places.setdefault(name, address) == address
        assert driver.counts.used_bytes == pool.counted_bytes <= 16 * MIB
        assert driver.counts.pinned_bytes == pool.host_bytes <= pool.host_budget_bytes
    assert driver.peaks()[0] == 16 * MIB
    statistics = pool.statistics
    assert statistics.hits + statistics.wakes == statistics.uses == 16
    assert statistics.peak_bytes == 16 * MIB
    assert statistics.host_peak_bytes <= pool.host_budget_bytes
    assert (statistics.host_peak_bytes == 0) == (host == 0)
    with pool.use("a") as model, torch.no_grad():
        model.weight.fill_(2.0)
    assert pool.shrink() == 0
    assert driver.counts.used_bytes == 0
    with pool.use("a") as model:
        assert (model.weight == 2.0).all()


def test_threads_stay_within_the_device_and_the_hosts_share(make, driver):
    pool = make(3 * MODEL + 3 * MIB, "abcdefgh", host=2 * MODEL + PIECE)
    batch = torch.ones(2, 1024)
    expected = {name: linear(seed)(batch) for seed, name in enumerate("abcdefgh")}
    stop, judged, wrong, uses = threading.Event(), [], [], [0] * 5
    parked = [entry.parked for entry in pool._entries.values()]

    def copies():
        return [(model.statistics, model.host_bytes) for model in parked]

    def judge():
        # Not what the engine believes: what the copies take. They are read one after the other, so
        # a sum is of one moment only if nothing moved until all were read again: whatever changes
        # a copy counts up in its statistics.
        while not stop.is_set():
            before = copies()
            if before == copies():
                judged.append(sum(host_bytes for _, host_bytes in before))
            time.sleep(0.001)

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(12):
            draw = torch.rand((), generator=generator).item()
            name = "abcdefgh"[min(int(8 * draw * draw), 7)]
            with pool.use(name, wait=60, activation_bytes="1MiB") as model, torch.no_grad():
                if not torch.equal(model(batch), expected[name]):
                    wrong.append(name)
            uses[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    watching = threading.Thread(target=judge)
    for thread in (watching, *threads):
        thread.start()
    for thread in threads:
        thread.join(120)
    stop.set()
    watching.join(10)
    judged.append(sum(model.host_bytes for model in parked))
    assert (wrong, uses) == ([], [12] * 5)
    assert 0 < max(judged) <= pool.host_budget_bytes
    used_bytes, pinned_bytes = driver.peaks()
    assert used_bytes <= pool.budget_bytes
    # Each thread may have one piece on its way to or from the disk besides.
    assert pinned_bytes <= pool.host_budget_bytes + 5 * PIECE
    statistics = pool.statistics
    assert statistics.peak_bytes <= pool.budget_bytes
    assert statistics.host_peak_bytes <= pool.host_budget_bytes
    assert sum(e.parked.statistics.bytes_read for e in pool._entries.values()) > 0
    assert driver.counts.used_bytes == len(pool.awake) * MODEL


def test_the_copy_that_is_expected_last_moves_on_to_the_disk(make, driver):
    pool = make("16MiB", "abcd", host="16MiB")
    assert pool.awake == ["a", "b"]
    assert pool.host_bytes == 16 * MIB
    for name in "ababab":
        used(pool, name)
    used(pool, "d")  # for one of the first two, which come often, a copy moves on: that of `c`
    assert pool.statistics.spills == 1
    disk = {name: entry.parked.statistics.bytes_written for name, entry in pool._entries.items()}
    assert disk == {"a": 0, "b": 0, "c": MODEL, "d": 0}
    assert pool.host_bytes == driver.counts.pinned_bytes == MODEL
    assert repr(pool) == (
        "<memfit.Pool on cuda:0, 2 of 4 models awake, 16.0 MiB of 16.0 MiB, "
        "copies in 8.0 MiB of 16.0 MiB of the host>"
    )
    with pool.use("c") as model:
        assert torch.equal(model.weight, linear(2).weight)


def test_a_copy_that_cannot_move_on_stays_and_the_next_goes_to_the_disk(make, driver, monkeypatch):
    pool = make("16MiB", "abcd", host="16MiB")
    for name in "ababab":
        used(pool, name)

    def is_full(_):
        message = "the disk is full"
        raise ParkError(message, "no_space")

    monkeypatch.setattr(memfit.ParkedModel, "to_disk", is_full)
    used(pool, "d")
    assert pool.statistics.spills == 0
    assert driver.peaks()[1] <= 16 * MIB + PIECE
    for seed, name in enumerate("abcd"):
        with pool.use(name) as model:
            assert torch.equal(model.weight, linear(seed).weight)
        assert pool.host_bytes <= 16 * MIB


def test_what_calls_took_counts_until_torch_gives_it_back(make, released):
    pool = make("19MiB", "ab", activation_bytes="2MiB")
    released.clear()
    used(pool, "a")
    assert pool.counted_bytes == 18 * MIB  # torch keeps the blocks
    used(pool, "a")
    assert (released, pool.statistics.releases) == ([], 0)
    used(pool, "b")  # may need others
    assert (released, pool.statistics.releases) == (["cuda:0"], 1)
    assert pool.statistics.parks == 0
    assert pool.counted_bytes == 18 * MIB
    assert pool.shrink(MODEL) == MODEL
    assert released == ["cuda:0"] * 2
    with pool.use("a"), pool.use("b", activation_bytes=0), ThreadPoolExecutor(1) as threads:
        waits = threads.submit(used, pool, "a", wait=0)
        with pytest.raises(PoolError, match=r"of `cuda:0` are in use"):
            waits.result(60)


def test_a_call_is_predicted_by_what_torchs_allocator_takes(make):
    pool = make("1GiB")
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    pool.add("a", model, example=torch.randn(1024, 256))
    before = pool.counted_bytes
    with pool.use("a"):
        activations = pool.counted_bytes - before
    # Two segments of 16 MiB for what ReLU reads and writes, and one for small ones.
    peak = 34 * MIB + sum(parameter.nbytes for parameter in model.parameters())
    assert 34 * MIB <= activations <= 34 * MIB + 0.06 * peak


def test_a_wake_that_fails_is_named_and_leaves_the_pool_as_it_was(make, driver, released):
    pool = make("8MiB", "ab")
    before = driver.counts.held()
    used(pool, "a")
    for code in (700, OUT_OF_MEMORY):
        refused = []
        for at in range(1, 60):
            driver.fail(at, code)
            try:
                used(pool, "b")
            except PoolError as error:
                refused.append(error)
            driver.fail(0)
            assert driver.counts.used_bytes == pool.counted_bytes
            # A host that pins nothing keeps the copy all the same.
            assert driver.counts.pinned_bytes in {0, pool.host_bytes}
            used(pool, "a")
        named = {error.reason: str(error).partition(";")[0] for error in refused}
        assert named == {
            "not_woken": "`b` could not be woken",
            "stuck": "no room of `cuda:0` for `b`: what is awake and not used cannot be parked",
        }
        causes = {error.__cause__.reason for error in refused}
        assert causes <= {"driver", "no_memory", "not_released"}
        assert driver.counts.held() == before
    with pool.use("b") as model:
        assert torch.equal(model.weight, linear(1).weight)
    # Others took the device: torch's own free blocks go first.
    driver.has(7 * MIB)
    released.clear()
    with pytest.raises(PoolError, match="`a` could not be woken") as caught:
        used(pool, "a")
    assert caught.value.__cause__.reason == "no_memory"
    assert released == ["cpu"]  # where the stand-in's tensors lie
    assert pool.counted_bytes == driver.counts.used_bytes == 0
    driver.has(8 * MIB)
    used(pool, "a")


def members(*named):
    def member(name, device):
        tensor = SimpleNamespace(device=torch.device(device), is_cuda=device.startswith("cuda"))
        return layout.Member(tensor, [name])

    return [member(name, device) for name, device in named]


@pytest.mark.parametrize(
    ("device", "lies", "said"),
    [
        ("host", [("weight", "cpu"), ("bias", "cpu")], None),
        ("host", [("a", "cpu"), ("b", "cuda:0")], r"`b` is on `cuda:0`, and .* `host`"),
        ("cuda:1", [("weight", "cuda:1")], None),
        ("cuda:1", [("steps", "cpu"), ("weight", "cuda:1")], None),  # stays on the host
        ("cuda:1", [("a", "cuda:1"), ("b", "cuda:0")], r"`b` is on `cuda:0`, and .* `cuda:1`"),
        ("cuda:1", [("a", "cpu"), ("b", "cpu")], r"`a` is on `host`, and .* `cuda:1`"),
        ("cuda:1", [("a", "meta"), ("b", "cuda:1")], "`a` is on `meta`"),
    ],
)
def test_a_model_lies_on_the_pools_device(monkeypatch, device, lies, said):
    monkeypatch.setattr(layout, "members", lambda *_: members(*lies))
    model = nn.Linear(1, 1)
    if said is None:
        pool_device.check("net", model, (), device)
        return
    with pytest.raises(ParkError, match=rf"cannot add `net`: {said}") as caught:
        pool_device.check("net", model, (), device)
    assert caught.value.reason == "unsupported"
    hint = str(caught.value).partition("\nhint: ")[2]
    assert ('device="cuda:0"' in hint) == ("cuda:0" in said)


def test_a_pool_names_a_device_that_is_there(monkeypatch, tmp_path):
    answers = {"is_available": True, "device_count": 2, "current_device": 1}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    named = {
        None: "host",
        "host": "host",
        "cpu": "host",
        "cuda": "cuda:1",
        "cuda:0": "cuda:0",
        torch.device("cuda", 1): "cuda:1",
    }
    assert {device: pool_device.device_of(device, None) for device in named} == named
    for device, said in {
        "cuda:2": "no device `cuda:2` here: torch sees 2 CUDA devices",
        "gpu": "`gpu` is no device",
        "xpu:0": "not on `xpu:0`",
        3.5: "`3.5` is no device",
    }.items():
        with pytest.raises(UsageError, match=said):
            memfit.Pool("1GiB", tmp_path, device=device)
    leased = SimpleNamespace(claims={"cuda:0": 5})
    assert pool_device.device_of(None, leased) == "cuda:0"
    assert pool_device.device_of(None, SimpleNamespace(claims={"host": 1, "cuda:0": 5})) == "host"
    assert pool_device.device_of("cuda:1", leased) == "cuda:1"
    with pytest.raises(UsageError, match="`stream` is for models on the host"):
        memfit.Pool("1GiB", tmp_path, device="cuda:0", stream=True)
    with pytest.raises(UsageError, match="`host` is for copies of models on a GPU"):
        memfit.Pool("1GiB", tmp_path, host="1GiB")


def test_what_a_pool_on_a_gpu_says_and_refuses(make, driver, tmp_path):
    half = _native.half_of_free_host_bytes()
    pool = memfit.Pool("8MiB", tmp_path / "parked", device="cuda:0", allow_memory=True)
    assert 0.8 * half <= pool.host_budget_bytes <= 1.2 * half
    with pytest.raises(ParkError, match="`source` is for models on the CPU") as caught:
        pool.add("a", linear(), source="weights.safetensors")
    assert caught.value.reason == "unsupported"
    pool.add("p", linear(), pinned=True)
    with pytest.raises(
        PoolError, match=r"leave 0 B \(0 bytes\) of the pool's 8\.0 MiB of `cuda:0`"
    ):
        pool.add("a", linear())
    gc.collect()
    assert driver.counts.used_bytes == MODEL


def stack(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()  # 256 MiB


@pytest.mark.gpu
def test_a_gpus_pool_stays_within_its_budget(tmp_path):
    inputs = torch.randn(512, 4096, device="cuda")
    expected = {}
    budget = 700 * MIB
    pool = memfit.Pool(budget, tmp_path, device="cuda", host="300MiB", allow_memory=True)
    for seed in range(4):
        model = stack(seed)
        expected[seed] = run(model, inputs)
        pool.add(str(seed), model, example=inputs)
    del model
    torch.cuda.empty_cache()
    # What is there besides the pool: the context, the inputs and what was expected of them.
    besides_pool = taken() - pool_bytes(pool)
    for seed in [0, 1, 2, 3, 0, 0, 2, 3, 1]:
        with pool.use(str(seed)) as model:
            assert torch.equal(run(model, inputs), expected[seed])
        # With all that torch keeps of the calls.
        assert taken() - besides_pool <= budget
        assert pool.host_bytes <= 300 * MIB
    assert pool.statistics.wakes > 0


@pytest.mark.gpu
def test_a_call_on_a_gpu_reserves_no_more_than_predicted(tmp_path):
    pool = memfit.Pool("2GiB", tmp_path, device="cuda", allow_memory=True)
    inputs = torch.randn(2048, 4096, device="cuda")
    pool.add("a", stack(0), example=inputs)
    run(pool._entries["a"].parked.model, inputs[:1])  # cuBLAS takes its workspace
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pool.use("a") as model:
        run(model, inputs)
    assert torch.cuda.memory_reserved() - before <= pool._entries["a"].activations


def run(model, inputs):
    with torch.no_grad():
        return model(inputs)


def taken():
    free, total = torch.cuda.mem_get_info()
    return total - free


def pool_bytes(pool):
    return sum(entry.parked.resident_bytes for entry in pool._entries.values())
