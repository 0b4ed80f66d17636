"""A pool in a lease that shrinks and grows: real models, a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from brokers import Broker, until
from stand_in import StandIn
from torch import nn

import memfit
from memfit import _native
from memfit.guard import overhead

MIB = 1 << 20
BESIDES = 3 * MIB
MODEL = 8 * MIB
WHOLE = BESIDES + 3 * MODEL


@pytest.fixture(autouse=True)
def known_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch takes besides is measured elsewhere."""
    monkeypatch.setattr(overhead, "expected", lambda _device: BESIDES)


@pytest.fixture
def pool(idle_broker: Broker, tmp_path: Path) -> Iterator[memfit.Pool]:
    """Three models awake, in all that the broker has."""
    idle_broker.start(memory=f"host={WHOLE}")
    with memfit.lease(WHOLE, floor=BESIDES) as lease:
        pool = memfit.Pool(lease=lease, spill=tmp_path / "parked", allow_memory=True)
        assert pool.budget_bytes == 3 * MODEL
        for number, name in enumerate("abc"):
            torch.manual_seed(number)
            pool.add(name, nn.Linear(1024, 2048, bias=False))
        assert pool.awake == ["a", "b", "c"]
        yield pool


def other(broker: Broker) -> _native.LeaseClient:
    """A connection of another line of work."""
    return _native.LeaseClient(broker.socket, "other")


def use(pool: memfit.Pool, name: str, wait: float | None = 60.0) -> float:
    """One call."""
    with pool.use(name, wait=wait) as model, torch.no_grad():
        return float(model(torch.ones(1024)).sum())


def test_idle_models_are_parked_for_another_process_and_come_back_when_there_is_room(
    pool: memfit.Pool, idle_broker: Broker
) -> None:
    before = {name: use(pool, name) for name in "abc"}
    needs = other(idle_broker)
    lease, _, _ = needs.acquire({"host": 2 * MODEL}, None, 0, 60, None, None)
    assert pool.counted_bytes <= pool.budget_bytes == MODEL
    assert idle_broker.granted() == WHOLE
    # One at a time still goes, each with the parameters it had.
    assert {name: use(pool, name) for name in "abc"} == before
    assert len(pool.awake) == 1
    with pool.use("a"), pytest.raises(memfit.PoolError) as caught:
        use(pool, "b", 1.0)
    assert caught.value.reason == "timed_out"
    assert idle_broker.granted() == WHOLE
    needs.release(lease)
    with pool.use("a"):
        assert use(pool, "b") == before["b"]
    assert pool.budget_bytes == 3 * MODEL
    assert pool.statistics.peak_bytes <= 3 * MODEL


def test_a_use_that_waits_has_the_bytes_as_soon_as_the_other_gives_them_back(
    pool: memfit.Pool, idle_broker: Broker
) -> None:
    needs = other(idle_broker)
    lease, _, _ = needs.acquire({"host": 2 * MODEL}, None, 0, 60, None, None)
    with ThreadPoolExecutor(1) as threads, pool.use("a"):
        waits = threads.submit(use, pool, "b")
        # It waits where all wait: at the broker.
        until(lambda: bool(idle_broker.status()["waiting"]))
        needs.release(lease)
        waits.result(timeout=60)


def test_what_is_used_is_given_when_its_block_ends(pool: memfit.Pool, idle_broker: Broker) -> None:
    needs = other(idle_broker)
    with ThreadPoolExecutor(1) as threads:
        with pool.use("a"), pool.use("b"), pool.use("c"):
            waits = threads.submit(needs.acquire, {"host": MODEL}, None, 0, 60, None, None)
            until(lambda: "shrink_asked" in idle_broker.log.read_text())
            assert not waits.done()
        waits.result(timeout=60)
    assert pool.budget_bytes == 2 * MODEL
    assert len(pool.awake) == 2


def test_what_cannot_be_given_is_declined_and_all_is_as_before(
    pool: memfit.Pool, idle_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.share.pool.leased.GIVE_WITHIN", 0.2)
    needs = other(idle_broker)
    with pool.use("a"), pool.use("b"), pool.use("c"):
        with pytest.raises(memfit.LeaseError):
            needs.acquire({"host": MODEL}, None, 0, 1.5, None, None)
        assert pool.budget_bytes == 3 * MODEL
    assert use(pool, "a") == use(pool, "a")
    assert pool.awake == ["a", "b", "c"]


def test_without_its_lease_a_pool_wakes_nothing(pool: memfit.Pool, idle_broker: Broker) -> None:
    assert pool._leased is not None
    pool._leased.lease.release()
    with pytest.raises(memfit.PoolError, match="lease has ended"):
        use(pool, "a")
    assert idle_broker.granted() == 0


def test_a_pool_on_a_gpu_follows_its_lease_there(
    idle_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StandIn(tmp_path)
    driver.put_in(monkeypatch)
    released: list[str] = []
    monkeypatch.setattr(overhead, "release", released.append)
    idle_broker.start(memory=f"cuda:0={WHOLE}")
    with memfit.lease(WHOLE, device="cuda:0", floor=BESIDES) as lease:
        pool = memfit.Pool(lease=lease, spill=tmp_path / "parked", host="1GiB", allow_memory=True)
        assert (pool.device, pool.budget_bytes) == ("cuda:0", 3 * MODEL)
        for number, name in enumerate("abc"):
            torch.manual_seed(number)
            pool.add(name, nn.Linear(1024, 2048, bias=False))
        before = {name: use(pool, name) for name in "abc"}
        driver.peaks()
        needs = other(idle_broker)
        taken, _, _ = needs.acquire({"cuda:0": 2 * MODEL}, None, 0, 60, None, None)
        assert driver.counts.used_bytes == pool.counted_bytes <= pool.budget_bytes == MODEL
        assert "cuda:0" in released
        assert {name: use(pool, name) for name in "abc"} == before
        assert driver.counts.used_bytes == MODEL
        needs.release(taken)
        with pool.use("a"):
            assert use(pool, "b") == before["b"]
        assert pool.budget_bytes == 3 * MODEL
        assert driver.peaks()[0] <= 3 * MODEL
        with pytest.raises(
            memfit.UsageError, match=r"models on `host`, and .* holds nothing there"
        ):
            memfit.Pool(lease=lease, spill=tmp_path, device="host")


def test_a_lease_or_a_budget_and_enough_of_it(broker: Broker, tmp_path: Path) -> None:
    del broker
    with memfit.lease(900) as lease:
        with pytest.raises(memfit.UsageError, match="and torch itself takes"):
            memfit.Pool(lease=lease, spill=tmp_path)
        with pytest.raises(memfit.UsageError, match="give a `budget`, or a `lease`"):
            memfit.Pool("1GiB", tmp_path, lease=lease)
        with pytest.raises(memfit.UsageError, match="give `spill`"):
            memfit.Pool(lease=lease)
    with pytest.raises(memfit.UsageError, match="give a `budget`, or a `lease`"):
        memfit.Pool(spill=tmp_path)
