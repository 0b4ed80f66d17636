"""Leases that torch is held to: by real allocations, in leases of a real broker."""

from __future__ import annotations

import gc
import mmap
import warnings
from collections.abc import Iterator

import pytest
import torch
from brokers import Broker, until
from test_elastic import Other, workload
from torch import Tensor

import memfit
from memfit import _native
from memfit.guard import overhead
from memfit.run import elastic
from memfit.share import idle
from memfit.track import cpu

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    """Count tensors, and see that every guard has ended."""
    assert cpu.start() is None
    gc.collect()
    yield
    gc.collect()
    with memfit.guard("64GiB"):
        empty(300 * MIB)


def empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def taken() -> int:
    """What this process takes of the host."""
    overhead.release("host")
    outside = max(overhead.resident() - _native.taken_bytes(), 0)
    return outside + _native.taken_bytes()


def test_torch_is_refused_what_the_lease_does_not_hold_in_whole_pages(
    idle_broker: Broker,
) -> None:
    idle_broker.start(memory="host=64GiB")
    with memfit.lease(taken() + 48 * MIB, guard=True) as lease:
        outside = lease.in_use["host"] - _native.taken_bytes()  # type: ignore[index]
        kept = [empty(40 * MIB)]
        low, high = 0, 48 * MIB // PAGE
        while high - low > 1:
            middle = (low + high) // 2
            try:
                empty(300 * 1024 + middle * PAGE)
                low = middle
            except RuntimeError:
                high = middle
        kept.append(empty(300 * 1024 + low * PAGE))
        assert 0 <= lease.bytes - outside - _native.taken_bytes() < PAGE
        assert lease.in_use == {"host": outside + _native.taken_bytes()}
    del kept
    assert lease.in_use is None
    assert idle_broker.granted() == 0


def test_the_block_ends_with_who_holds_what_and_the_guard_with_it(idle_broker: Broker) -> None:
    idle_broker.start(memory="host=64GiB")
    with (
        pytest.raises(memfit.OutOfBudget) as caught,
        memfit.lease(taken() + 32 * MIB, guard=True),
    ):
        empty(100 * MIB)
    assert caught.value.requested_bytes == 100 * MIB
    assert caught.value.in_use_bytes + 100 * MIB > caught.value.budget_bytes
    assert idle_broker.granted() == 0
    empty(100 * MIB)


def test_the_guard_follows_a_lease_that_grows_and_shrinks(idle_broker: Broker) -> None:
    idle_broker.start(memory="host=64GiB")
    with memfit.lease(taken() + 32 * MIB, guard=True) as lease:
        small = lease.bytes
        with pytest.raises(RuntimeError, match="tried to allocate"):
            empty(64 * MIB)
        lease.resize(small + 64 * MIB)
        empty(64 * MIB)
        lease.resize(small)
        assert idle_broker.granted() == small
        with pytest.raises(RuntimeError, match="tried to allocate"):
            empty(64 * MIB)
        # What the broker refuses leaves both as they were.
        with pytest.raises(memfit.LeaseError):
            lease.resize("65GiB")
        with pytest.raises(RuntimeError, match="tried to allocate"):
            empty(64 * MIB)
        empty(16 * MIB)


def test_bytes_that_are_live_are_not_given_back_and_the_error_has_the_numbers(
    idle_broker: Broker,
) -> None:
    idle_broker.start(memory="host=64GiB")
    with memfit.lease(taken() + 96 * MIB, guard=True) as lease:
        whole = lease.bytes
        live = torch.ones(64 * MIB, dtype=torch.uint8)
        target = whole - 64 * MIB
        with pytest.raises(
            memfit.LeaseError, match=f"stays at {_native.bytes_text(whole)}"
        ) as caught:
            lease.resize(target)
        assert (caught.value.reason, caught.value.asked_bytes) == ("in_use", target)
        assert f"tensors take {_native.bytes_text(_native.taken_bytes())}" in str(caught.value)
        assert idle_broker.granted() == whole
        empty(16 * MIB)  # nor was the budget shrunk
        del live
        lease.resize(target)
        assert idle_broker.granted() == target


def test_a_lease_that_cannot_give_way_by_its_guard_says_no_to_who_asks(
    idle_broker: Broker,
) -> None:
    size = taken() + 256 * MIB
    idle_broker.start(memory=f"host={size}")
    with memfit.lease(size, floor=MIB, guard=True) as lease:
        live = torch.ones(200 * MIB, dtype=torch.uint8)
        waits = Other(idle_broker).ask(128 * MIB, 1.0)
        until(lambda: lease.asked is not None)
        assert not idle.answer(lease, in_use=lambda _: 0)
        assert lease.asked is None
        with pytest.raises(memfit.LeaseError):
            waits.result(timeout=30)
        assert lease.bytes == size
        del live


def test_a_lease_below_what_the_process_takes_is_given_back_at_once(broker: Broker) -> None:
    with pytest.raises(memfit.BudgetError, match="more than the lease of 900 B"):
        memfit.lease(900, guard=True)
    assert broker.granted() == 0


def test_without_a_broker_the_guard_holds_all_the_same(idle_broker: Broker) -> None:
    del idle_broker
    with pytest.warns(memfit.NoBrokerWarning):
        lease = memfit.lease(taken() + 32 * MIB, guard=True)
    assert lease.is_alone
    lease.resize(lease.bytes + 32 * MIB)
    empty(48 * MIB)
    with pytest.raises(memfit.OutOfBudget), lease:
        empty(100 * MIB)


def test_a_guarded_step_follows_its_lease_and_its_results_are_the_same_bits(
    idle_broker: Broker,
) -> None:
    twin = memfit.fit(workload(), "100GiB")
    torch.manual_seed(1)
    expected = [twin.step().item() for _ in range(4)]
    step = workload()
    peak = memfit.predict(step).predicted_peak_bytes
    # Scratch memory of the first steps, which nobody knows of before.
    size = elastic.besides_of(step, "host") + 4 * peak + 32 * MIB
    idle_broker.start(memory=f"host={size}")
    lease = memfit.lease(size, floor=MIB)
    fitted = memfit.fit(step, lease=lease, guard=True, forbid=["fuse_optimizer"])
    follower = fitted.elastic
    assert follower is not None
    torch.manual_seed(1)
    losses = [fitted.step().item()]
    other = Other(idle_broker)
    waits = other.ask(size - follower.besides_bytes - peak * 3 // 4, 60)
    until(lambda: lease.asked is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", memfit.RecoveryWarning)
        losses += [fitted.step().item() for _ in range(3)]
    waits.result(timeout=30)
    assert follower.shrunk == 1
    assert losses == expected
    for name, value in twin.workload.model.state_dict().items():
        assert torch.equal(value, fitted.workload.model.state_dict()[name]), name


def test_a_step_that_is_refused_within_its_lease_runs_by_a_tighter_plan(
    idle_broker: Broker,
) -> None:
    twin = memfit.fit(workload(), "100GiB")
    torch.manual_seed(1)
    expected = [twin.step().item() for _ in range(3)]
    step = workload()
    peak = memfit.predict(step).predicted_peak_bytes
    idle_broker.start(memory="host=64GiB")
    # Scratch memory of the first step, which nobody knows of before, has room.
    lease = memfit.lease(elastic.besides_of(step, "host") + peak + 64 * MIB)
    fitted = memfit.fit(step, lease=lease, guard=True, forbid=["fuse_optimizer"])
    follower = fitted.elastic
    assert follower is not None
    assert fitted.plan.actions == ()
    torch.manual_seed(1)
    losses = [fitted.step().item()]
    assert fitted.report().recovered_steps == 0
    # No plan knows of it. It leaves two thirds of the step's peak by what the guard itself counts,
    # which from the first step on are tensors alone: memory that the process takes or gives back
    # in addition to them no longer moves the line.
    free = lease.bytes - follower._guard.in_use()["host"]
    other = torch.ones(free - peak * 2 // 3, dtype=torch.uint8)
    with pytest.warns(memfit.RecoveryWarning):
        losses.append(fitted.step().item())
    losses.append(fitted.step().item())
    assert fitted.report().recovered_steps == 1
    assert losses == expected
    del other
