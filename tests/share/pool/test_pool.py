"""Many models, one budget: never over it, nobody waits for ever."""

import threading
import time

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import ParkError, PoolError, UsageError

MIB = 1 << 20
MODEL = 4 * MIB


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(1024, 1024, bias=False)


@pytest.fixture
def make(tmp_path):
    """Pools whose folder may lie in memory here."""

    def pool(budget, names="", **options):
        made = memfit.Pool(budget, tmp_path / "parked", allow_memory=True)
        for seed, name in enumerate(names):
            made.add(name, linear(seed), **options)
        return made

    return pool


def started(target):
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_models_step_aside_for_each_other_and_come_back_as_they_were(make):
    pool = make("9MiB", "abcd")
    batch = torch.ones(2, 1024)
    expected = {name: linear(seed)(batch) for seed, name in enumerate("abcd")}
    for name in "abcdabcdaabbccdd":
        with pool.use(name) as model:
            assert torch.equal(model(batch), expected[name])
            assert name in pool.awake
        assert pool.counted_bytes <= 9 * MIB
        assert len(pool.awake) <= 2
    statistics = pool.statistics
    assert statistics.uses == 16
    assert statistics.hits + statistics.wakes == 16
    assert statistics.wakes <= statistics.parks + 2
    assert statistics.bytes_woken == statistics.wakes * MODEL
    assert statistics.peak_bytes <= 9 * MIB
    assert (len(pool), "a" in pool, "e" in pool) == (4, True, False)


def test_a_model_that_is_awake_is_used_without_waiting(make):
    pool = make("8MiB", "ab")
    assert pool.awake == ["a", "b"]
    for name in "abab":
        with pool.use(name):
            pass
    assert pool.statistics.hits == 4
    assert pool.statistics.waits == 0
    assert pool.statistics.parks == 0
    assert repr(pool) == "<memfit.Pool 2 of 2 models awake, 8.0 MiB of 8.0 MiB>"


def test_a_pinned_model_is_never_parked(make):
    pool = make("8MiB", "p", pinned=True)
    for name in "ab":
        pool.add(name, linear())
    for name in "abapbab":
        with pool.use(name):
            pass
        assert "p" in pool.awake


def test_what_can_never_fit_is_refused_at_once_with_numbers(make):
    pool = make("8MiB", "p", pinned=True)
    with pytest.raises(PoolError, match=r"`big` can never fit: it takes 8.0 MiB") as caught:
        pool.add("big", nn.Linear(1024, 2048, bias=False))
    assert caught.value.reason == "too_large"
    assert (caught.value.wanted_bytes, caught.value.available_bytes) == (8 * MIB, 4 * MIB)
    assert "big" not in pool
    pool.add("a", linear())
    with pytest.raises(PoolError, match="can never fit"), pool.use("a", activation_bytes=1):
        pass
    with pool.use("a"):
        pass


def test_a_model_that_was_refused_is_an_ordinary_model_again(make):
    pool = make("2MiB")
    model = linear()
    with pytest.raises(PoolError):
        pool.add("a", model)
    assert torch.equal(model.weight, linear().weight)
    memfit.Pool(MODEL, pool._spill, allow_memory=True).add("a", model)


def test_callers_wait_for_room_rather_than_exceed(make):
    pool = make("4MiB", "ab")
    inside, leave, order = threading.Event(), threading.Event(), []

    def holder():
        with pool.use("a"):
            inside.set()
            leave.wait(30)
            order.append("a leaves")

    def waiter():
        with pool.use("b"):
            order.append("b")

    first = started(holder)
    inside.wait(30)
    second = started(waiter)
    with (
        pytest.raises(PoolError, match=r"no room within the time given: 4\.0 MiB of") as caught,
        pool.use("b", wait=0.05),
    ):
        pass
    assert caught.value.reason == "timed_out"
    leave.set()
    first.join(30)
    second.join(30)
    assert order == ["a leaves", "b"]
    assert pool.statistics.waits >= 1
    assert pool.statistics.waited_seconds > 0


def test_activations_count_for_as_long_as_the_call(make):
    pool = make("6MiB", "a", activation_bytes="1MiB")
    inside, leave = threading.Barrier(3), threading.Event()

    def call():
        with pool.use("a"):
            inside.wait(30)
            leave.wait(30)

    threads = [started(call) for _ in range(2)]
    inside.wait(30)
    assert pool.counted_bytes == 6 * MIB
    with pytest.raises(PoolError, match="no room within"), pool.use("a", wait=0):
        pass
    with pool.use("a", wait=0, activation_bytes=0):
        pass
    leave.set()
    for thread in threads:
        thread.join(30)
    assert pool.counted_bytes == 4 * MIB


def test_activations_are_predicted_from_an_example(make):
    pool = make("64MiB")
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    pool.add("a", model, example=torch.randn(64, 256))
    before = pool.counted_bytes
    with pool.use("a"):
        activations = pool.counted_bytes - before
    # What ReLU reads and writes, and the input.
    assert 2 * MIB <= activations <= 2.2 * MIB
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    model.register_buffer("table", torch.zeros(4096, 1024))  # the model's own too
    pool.add("t", model, example=torch.randn(64, 256))
    before = pool.counted_bytes
    with pool.use("t"):
        assert 2 * MIB <= pool.counted_bytes - before <= 2.2 * MIB
    with pytest.raises(UsageError, match="say the same"):
        pool.add("b", linear(), example=torch.randn(1, 1024), activation_bytes=3)


def test_a_thread_may_use_two_models_and_two_threads_do_not_wait_for_each_other(make):
    pool = make("8MiB", "abc")
    with pool.use("a") as first, pool.use("b") as second, pool.use("a") as again:
        assert first is again
        assert second is not first
        with (
            pytest.raises(PoolError, match=r"this thread's own uses leave 0 B") as caught,
            pool.use("c"),
        ):
            pass
        assert caught.value.reason == "too_large"
    barrier, seen = threading.Barrier(2), []

    def crosswise(one, other):
        with pool.use(one):
            barrier.wait(30)
            try:
                with pool.use(other, wait=20, activation_bytes=0):
                    seen.append("used")
            except PoolError as error:
                seen.append(error.reason)

    threads = [
        started(lambda: crosswise("a", "b")),
        started(lambda: crosswise("b", "a")),
    ]
    for thread in threads:
        thread.join(60)
    assert seen == ["used", "used"]  # both are awake: no one waits


def test_of_two_holders_that_would_wait_one_is_refused(make):
    pool = make("12MiB", "abcd")
    barrier, seen = threading.Barrier(2), []

    def more(one, other):
        with pool.use(one, activation_bytes="1MiB"):
            barrier.wait(30)
            try:
                # Fits beside its own, but not beside the other's too.
                with pool.use(other, wait=20, activation_bytes="3MiB"):
                    seen.append("used")
            except PoolError as error:
                seen.append(error.reason)

    threads = [started(lambda: more("a", "c")), started(lambda: more("b", "d"))]
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == ["contended", "used"]


def test_a_model_that_cannot_be_parked_is_said_and_tried_again_later(make):
    pool = make("4MiB", "ab")
    with pool.use("a") as model:
        view = model.weight.t()
    with (
        pytest.raises(PoolError, match="no room for `b`: what is awake") as caught,
        pool.use("b"),
    ):
        pass
    assert caught.value.reason == "stuck"
    assert isinstance(caught.value.__cause__, ParkError)
    assert caught.value.__cause__.reason == "aliased"
    assert torch.isfinite(view).all()
    del view, model
    with pool.use("a"):
        pass
    with pool.use("b"):
        pass
    assert pool.awake == ["b"]


@pytest.mark.filterwarnings("ignore::memfit.PoolWarning")  # it compares copies inside a use
def test_a_signal_when_a_model_was_just_moved_leaves_no_wrong_count(make, monkeypatch):
    pool = make("4MiB", "ab")
    park, wake = memfit.ParkedModel.park, memfit.ParkedModel.wake

    def interrupted(move):
        def moved(self, **options):
            move(self, **options)
            raise KeyboardInterrupt

        return moved

    monkeypatch.setattr(memfit.ParkedModel, "park", interrupted(park))
    with pytest.raises(KeyboardInterrupt), pool.use("b"):
        pass
    assert (pool.awake, pool.counted_bytes) == ([], 0)
    monkeypatch.setattr(memfit.ParkedModel, "park", park)
    monkeypatch.setattr(memfit.ParkedModel, "wake", interrupted(wake))
    with pytest.raises(KeyboardInterrupt), pool.use("b"):
        pass
    assert (pool.awake, pool.counted_bytes) == (["b"], MODEL)
    monkeypatch.setattr(memfit.ParkedModel, "wake", wake)
    for name, seed in (("b", 1), ("a", 0), ("b", 1)):
        with pool.use(name) as model:
            assert torch.equal(model.weight, linear(seed).weight)


@pytest.mark.filterwarnings("ignore::memfit.PoolWarning")  # it compares copies inside a use
def test_a_wake_that_fails_is_said_and_frees_its_room(make, tmp_path):
    weights = tmp_path / "model.safetensors"
    model = linear()
    header = b'{"weight":{"dtype":"F32","shape":[1024,1024],"data_offsets":[0,4194304]}}'
    content = len(header).to_bytes(8, "little") + header + model.weight.detach().numpy().tobytes()
    weights.write_bytes(content)
    pool = make("4MiB")
    pool.add("a", model, source=weights)
    pool.add("b", linear())
    with pool.use("b"):
        pass
    weights.write_bytes(content[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(PoolError, match="`a` could not be woken") as caught, pool.use("a"):
            pass
        assert caught.value.__cause__.reason == "changed"
        assert pool.counted_bytes == 0
    with pool.use("b"):
        pass
    weights.write_bytes(content)
    with pool.use("a") as woken:
        assert torch.equal(woken.weight, linear().weight)


@pytest.mark.filterwarnings("ignore::memfit.PoolWarning")  # it compares copies inside a use
def test_a_changed_model_is_written_and_an_unchanged_one_is_not(make):
    pool = make("4MiB", "ab")
    for name in "abab":
        with pool.use(name):
            pass
    written = pool.statistics.bytes_written
    assert written <= 2 * MODEL
    with pool.use("a") as model, torch.no_grad():
        model.weight.fill_(2.0)
    with pool.use("b"):
        pass
    assert pool.statistics.bytes_written == written + MODEL
    with pool.use("a") as model:
        assert (model.weight == 2.0).all()


def test_a_model_is_taken_out_when_nobody_uses_it(make):
    pool = make("4MiB", "ab")
    with pool.use("a") as model:
        with pytest.raises(PoolError, match="`a` is used or waited for") as caught:
            pool.remove("a")
        assert caught.value.reason == "in_use"
    parked = pool.remove("a")
    assert parked.model is model
    assert pool.counted_bytes == 0
    with pytest.raises(PoolError, match="the pool has no model `a`; it has `b`") as caught:
        pool.remove("a")
    assert caught.value.reason == "unknown"
    with pytest.raises(PoolError, match="has a model `b` already"):
        pool.add("b", linear())
    parked.wake()
    assert model.weight.shape == (1024, 1024)


def test_sizes_and_models_that_are_none_are_refused(make, tmp_path):
    with pytest.raises(UsageError, match="cannot keep a pool within `-1` bytes"):
        make(-1)
    with pytest.raises(UsageError, match=r"a percentage of what"):
        make("50%")
    with pytest.raises(memfit.BudgetError):
        make("lots")
    with pytest.raises(UsageError, match="must be an `nn"):
        make("1GiB").add("a", 3)
    (tmp_path / "file").touch()
    with pytest.raises(ParkError, match="is no folder"):
        memfit.Pool("1GiB", tmp_path / "file").add("a", linear())


def test_threads_that_hammer_a_pool_stay_within_it_and_all_get_their_turn(make):
    pool = make(3 * MODEL + 3 * MIB, "abcdefgh")
    batch = torch.ones(2, 1024)
    expected = {name: linear(seed)(batch) for seed, name in enumerate("abcdefgh")}
    stop, over, wrong, uses = threading.Event(), [], [], [0] * 6

    def judge():
        while not stop.is_set():
            # Not what the engine believes: what lies in memory.
            resident = sum(entry.parked.resident_bytes for entry in pool._entries.values())
            if resident > pool.budget_bytes:
                over.append(resident)
            time.sleep(0.001)

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(25):
            draw = torch.rand((), generator=generator).item()
            name = "abcdefgh"[min(int(8 * draw * draw), 7)]
            with pool.use(name, wait=60, activation_bytes="1MiB") as model, torch.no_grad():
                if not torch.equal(model(batch), expected[name]):
                    wrong.append(name)
            uses[number] += 1

    watching = started(judge)
    threads = [started(lambda number=number: work(number)) for number in range(6)]
    for thread in threads:
        thread.join(120)
    stop.set()
    watching.join(10)
    assert (over, wrong) == ([], [])
    assert uses == [25] * 6
    assert pool.statistics.peak_bytes <= pool.budget_bytes
    assert pool.counted_bytes <= pool.budget_bytes
    assert pool.statistics.uses == 150


@pytest.mark.filterwarnings("ignore::memfit.PoolWarning")  # it compares copies inside a use
def test_an_idle_pool_steps_aside_and_is_there_again_when_it_is_used(make):
    pool = make("12MiB", "abc")
    assert pool.shrink("9MiB") == 2 * MODEL
    assert len(pool.awake) == 2
    with pool.use("b") as model:
        assert pool.shrink() == MODEL
        assert pool.awake == ["b"]
        assert torch.equal(model.weight, linear(1).weight)
    assert pool.shrink() == 0
    assert pool.awake == []
    with pool.use("a") as model:
        assert torch.equal(model.weight, linear(0).weight)


def test_what_cannot_step_aside_is_named(make):
    pool = make("8MiB", "ab")
    with pool.use("a") as model:
        view = model.weight.t()
    with pytest.raises(ParkError, match="cannot park `weight`: a tensor outside"):
        pool.shrink()
    assert pool.awake == ["a"]
    assert view.shape == (1024, 1024)
    del view
    with pool.use("a"):  # used again, it may be parked again
        pass
    assert pool.shrink() == 0


def _grows(pool, name, rows):
    with pool.use(name) as model, torch.no_grad():
        model(torch.ones(rows, 1024))


def test_a_use_that_takes_more_than_it_counts_with_is_told_of_at_once(tmp_path):
    pool = memfit.Pool("12MiB", spill=tmp_path, allow_memory=True)
    for name in "ab":
        pool.add(name, linear(0), activation_bytes="16KiB")
    _grows(pool, "a", 2)
    said = pool.activations("a")
    assert 0 < said.measured_bytes <= 1.05 * said.declared_bytes
    match = r"tensors took 16\.0 MiB .* `a` was used, .* held 24\.0 MiB of its budget of 12\.0 MiB"
    with pytest.warns(memfit.PoolWarning, match=match):
        _grows(pool, "a", 2048)
    assert pool.activations("a").measured_bytes == 16 * MIB
    assert pool.activations("a").declared_bytes == said.declared_bytes
    _grows(pool, "a", 2048)  # once; and the other model steps aside for it from now on
    assert pool.awake == ["a"]
    _grows(pool, "b", 2)


def test_what_others_take_meanwhile_is_no_uses(tmp_path):
    pool = memfit.Pool("64MiB", spill=tmp_path, allow_memory=True)
    for name in "ab":
        pool.add(name, linear(0), example=torch.ones(2, 1024))
    with pool.use("a"), pool.use("b") as model, torch.no_grad():
        model(torch.ones(2048, 1024))
    assert pool.activations("a").measured_bytes == 0
    assert pool.activations("b").measured_bytes == 0
