"""``memfit.lease``: in one process, in threads, over forks, without a broker."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from brokers import Broker, until

import memfit

T = TypeVar("T")


def test_a_lease_is_held_inside_the_block_and_not_after_it(broker: Broker) -> None:
    with memfit.lease("700B", label="block") as lease:
        assert lease.bytes == 700
        assert not lease.is_alone
        assert broker.granted() == 700
    assert lease.claims == {}
    until(lambda: broker.granted() == 0)


def test_a_lease_ends_with_the_block_even_when_the_block_fails(broker: Broker) -> None:
    with pytest.raises(ZeroDivisionError), memfit.lease(700):
        _ = 1 / 0
    assert broker.granted() == 0


def test_what_does_not_fit_is_refused_with_what_would(broker: Broker) -> None:
    with memfit.lease(700), pytest.raises(memfit.LeaseError, match="300 B are free") as caught:
        in_another_thread(lambda: memfit.lease(400))
    assert (caught.value.reason, caught.value.largest_bytes) == ("no_room", 300)
    with pytest.raises(memfit.LeaseError) as caught:
        memfit.lease("1GiB", wait=None)
    assert (caught.value.reason, caught.value.largest_bytes) == ("above_capacity", 1000)
    assert broker.granted() == 0


def test_a_lease_waits_for_room_and_no_longer_than_it_says(broker: Broker) -> None:
    held = memfit.lease(700)
    start = time.monotonic()
    with pytest.raises(memfit.LeaseError) as caught:
        in_another_thread(lambda: memfit.lease(400, wait=0.3))
    assert caught.value.reason == "timed_out"
    assert time.monotonic() - start >= 0.3
    threading.Timer(0.2, held.release).start()
    assert in_another_thread(lambda: memfit.lease(400, wait=30).bytes) == 400
    del broker


def test_threads_that_wait_do_not_keep_others_from_giving_back(broker: Broker) -> None:
    together = 0
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal together, most
        for _ in range(10):
            with memfit.lease(400, wait=60):
                with lock:
                    together += 1
                    most = max(most, together)
                with lock:
                    together -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most <= 2
    until(lambda: broker.granted() == 0)


def test_a_lease_grows_and_shrinks(broker: Broker) -> None:
    with memfit.lease(300) as lease:
        lease.resize(900)
        assert broker.granted() == 900
        with pytest.raises(memfit.LeaseError):
            lease.resize(1001)
        assert lease.bytes == 900
        lease.resize(0)
        assert broker.granted() == 0
        lease.resize(100)
        assert lease.bytes == 100
    with pytest.raises(memfit.LeaseError, match="released"):
        lease.resize(1)


def test_two_holders_that_wait_for_each_other_are_not_left_waiting(broker: Broker) -> None:
    with memfit.lease(500) as first:
        second = in_another_thread(lambda: memfit.lease(500))
        waiting = threading.Thread(target=lambda: first.resize(800, wait=60))
        waiting.start()
        until(lambda: len(broker.status()["waiting"]) == 1)
        with pytest.raises(memfit.LeaseError) as caught:
            second.resize(800, wait=60)
        assert caught.value.reason == "contended"
        second.release()
        waiting.join(60)
        assert first.bytes == 800


def test_an_elastic_lease_is_asked_to_shrink_for_one_that_waits(broker: Broker) -> None:
    with memfit.lease(900, floor=200) as elastic:
        got: list[int] = []
        waiter = threading.Thread(target=lambda: got.append(memfit.lease(500, wait=60).bytes))
        waiter.start()
        until(lambda: elastic.asked is not None)
        assert elastic.asked == {"host": 500}
        elastic.resize(500)
        waiter.join(60)
        assert got == [500]
        assert elastic.asked is None
    del broker


def test_a_forked_child_does_not_own_the_lease_of_its_parent(broker: Broker) -> None:
    lease = memfit.lease(600)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            lease.resize(100)
        except memfit.LeaseError as error:
            code = 0 if error.reason == "forked" else 2
        lease.release()  # nothing
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own = memfit.lease(300)
        os._exit(code if own.bytes == 300 else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: broker.granted() == 600)
    lease.resize(500)
    lease.release()
    assert broker.granted() == 0


def test_without_a_broker_a_lease_is_granted_and_says_that_it_is_alone(
    idle_broker: Broker,
) -> None:
    with pytest.warns(memfit.NoBrokerWarning, match="memfit broker"):
        lease = memfit.lease({"host": "3GiB", "cuda:0": "1GiB"})
    with lease:
        assert lease.is_alone
        assert lease.bytes == 4 << 30
        lease.resize("5GiB")
        assert lease.bytes == 5 << 30
        assert lease.asked is None
    assert lease.bytes == 0
    del idle_broker


@pytest.mark.parametrize(
    ("size", "label"), [(10, "x" * 201), ({"x" * 20_000: 10}, None), ({"host": 10}, "x" * 20_000)]
)
def test_a_bad_request_takes_no_lease_that_is_held(
    broker: Broker, size: int | dict[str, int], label: str | None
) -> None:
    with memfit.lease(800) as held:
        with pytest.raises(memfit.LeaseError) as caught:
            memfit.lease(size, label=label)
        assert caught.value.reason == "bad_request"
        with pytest.raises(memfit.LeaseError, match="200 B are free"):
            in_another_thread(lambda: memfit.lease(1000))
        held.resize(700)
        assert held.is_held
    assert not held.is_held


def test_a_lease_whose_time_is_over_is_not_held_whether_the_broker_says_so_or_not(
    broker: Broker,
) -> None:
    assert broker.process is not None
    with memfit.lease(600, time_to_live=1.0) as lease:
        broker.process.send_signal(signal.SIGSTOP)
        assert lease.is_held
        until(lambda: not lease.is_held)
        assert lease.claims == {}
        broker.process.send_signal(signal.SIGCONT)
        with pytest.raises(memfit.LeaseError, match="Expired") as caught:
            lease.resize(500)
        assert caught.value.reason == "ended"
    until(lambda: broker.granted() == 0)


def test_ctrl_c_ends_giving_back_to_a_broker_that_does_not_answer(broker: Broker) -> None:
    assert broker.process is not None
    lease = memfit.lease(600)
    broker.process.send_signal(signal.SIGSTOP)
    interrupt = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    interrupt.join()
    assert not lease.is_held
    broker.process.send_signal(signal.SIGCONT)
    until(lambda: broker.granted() == 0)


def test_a_lease_that_a_broker_lost_is_not_held(broker: Broker) -> None:
    with memfit.lease(600) as lease:
        broker.kill()
        broker.socket.with_suffix(".state").unlink()
        assert lease.is_held
        broker.start()
        until(lambda: not lease.is_held)
        assert "ended" in repr(lease)
    assert broker.granted() == 0


def test_a_script_with_a_long_name_gets_leases(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 80])
    assert in_another_thread(lambda: memfit.lease(600).bytes) == 600
    del broker


def test_a_broker_that_is_away_is_waited_for(broker: Broker) -> None:
    held = memfit.lease(800)
    broker.kill()
    threading.Timer(0.5, broker.start).start()
    with pytest.raises(memfit.LeaseError) as caught:
        in_another_thread(lambda: memfit.lease(1000, wait=0.2))
    assert caught.value.reason in {"no_room", "held_back"}
    until(lambda: broker.granted() == 800)
    held.release()


@pytest.mark.parametrize("has_socket", [False, True])
def test_while_a_broker_is_away_nobody_is_told_to_be_alone_who_did_not_ask(
    broker: Broker, *, has_socket: bool
) -> None:
    held = memfit.lease(800)
    broker.kill()
    if not has_socket:
        broker.socket.unlink()
    with pytest.raises(memfit.LeaseError) as caught:
        in_another_thread(lambda: memfit.lease(1000))
    assert caught.value.reason == "broker_away"
    assert "alone=True" in caught.value.__notes__[0]
    with pytest.warns(memfit.NoBrokerWarning, match="is away"):
        assert in_another_thread(lambda: memfit.lease(1000, alone=True)).is_alone
    # After a boot nobody of before holds anything.
    state = broker.socket.with_suffix(".state")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    state.write_text(state.read_text().replace(boot, "another"))
    with pytest.warns(memfit.NoBrokerWarning, match="no broker"):
        assert in_another_thread(lambda: memfit.lease(1000)).is_alone
    held.release()


@pytest.mark.parametrize("size", ["-3GiB", -1, 2**64, "60%", "", "3 apples", True])
def test_a_size_that_is_none_is_refused_by_its_words(idle_broker: Broker, size: object) -> None:
    with pytest.raises(memfit.MemfitError):
        memfit.lease(size)  # type: ignore[arg-type]
    del idle_broker


def in_another_thread(work: Callable[[], T]) -> T:
    """Do something as another line of work."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_what_allocators_only_keep_goes_back_before_a_lease_ends(
    broker: Broker, script: Callable[[str], subprocess.Popen[str]]
) -> None:
    """Or the next to lease the bytes would take them while they are still resident here."""
    process = script(
        """
import torch, memfit
from memfit.guard.overhead import resident
torch.ones(4 << 20)  # freed, so glibc keeps what is smaller when it is freed
with memfit.lease(100):
    kept = [torch.ones(1 << 18) for _ in range(64)]
    last = torch.ones(1 << 18)  # glibc gives back no memory below it
    del kept
    held = resident()
print(held - resident())
"""
    )
    said, _ = process.communicate(timeout=60)
    assert int(said) > 48 << 20
    assert broker.granted() == 0
