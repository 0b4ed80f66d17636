"""Leases that give way while their process is idle, to a real broker."""

from __future__ import annotations

import threading

import pytest
from brokers import Broker, until

import memfit
from memfit import _native
from memfit.share import idle


def another(broker: Broker, size: int, wait: float) -> int:
    """What another client gets."""
    client = _native.LeaseClient(broker.socket, "other")
    _, _, granted = client.acquire({"host": size}, None, 0, wait, None, None)
    return granted["host"]


def test_cached_blocks_go_before_anything_of_the_lease_and_what_is_used_stays(
    broker: Broker,
) -> None:
    lease = memfit.lease(900, floor=100)
    cached = {"host": 500}
    order: list[str] = []

    def release(device: str) -> None:
        order.append("release")
        cached[device] = 0

    def in_use(device: str) -> int:
        order.append("look")
        return 150 + cached[device]

    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(another(broker, 700, 60)))
    waiter.start()
    until(lambda: lease.asked is not None)
    assert idle.answer(lease, release=release, in_use=in_use)
    waiter.join(60)
    assert got == [700]
    assert order == ["release", "look"]
    assert lease.bytes == 300
    assert not idle.answer(lease, release=release, in_use=in_use)


def test_what_a_process_uses_is_not_given_away(broker: Broker) -> None:
    lease = memfit.lease(900, floor=100)

    def is_refused() -> None:
        with pytest.raises(memfit.LeaseError):
            another(broker, 700, 1.0)

    waiter = threading.Thread(target=is_refused)
    waiter.start()
    until(lambda: lease.asked is not None)
    assert not idle.answer(lease, release=lambda _: None, in_use=lambda _: 5000)
    waiter.join(60)
    assert lease.bytes == 900


def test_an_idle_process_gives_way_by_itself_before_the_other_is_refused(
    idle_broker: Broker,
) -> None:
    tib = 1 << 40
    idle_broker.start(memory=f"host={tib}")
    with memfit.lease(tib, floor=tib // 8, courteous=True) as lease:
        # Far more than this process uses is held; half of it is enough for the other.
        assert another(idle_broker, tib // 2, 30) == tib // 2
        until(lambda: lease.bytes == tib // 2)
        # The other is gone, and what this process uses again it asks for again.
        lease.resize(tib, wait=30)
        assert lease.bytes == tib
    until(lambda: idle._thread is None)


def test_a_courteous_lease_says_how_far_it_gives_way(broker: Broker) -> None:
    del broker
    with pytest.raises(memfit.UsageError, match="floor"):
        memfit.lease(10, courteous=True)
