"""Training inside a lease that shrinks and grows: between steps, and nothing else changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from brokers import Broker, until
from torch import Tensor, nn

import memfit
from memfit import _native
from memfit.measure import measure_peak, static_tensors
from memfit.run import elastic

MIB = 1 << 20
ROOMY = "host=64GiB"


def workload() -> memfit.Workload:
    """A deep step whose activations are most of its peak."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))

    model = nn.Sequential(*[block() for _ in range(8)])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    return memfit.Workload(
        model=model, batch=torch.randn(2048, 128), loss=loss, optimizer=torch.optim.AdamW
    )


def state(fitted: memfit.Fitted) -> dict[str, Tensor]:
    """The parameters, copied."""
    return {k: v.clone() for k, v in fitted.workload.model.state_dict().items()}


class Other:
    """Another client, on a connection of its own."""

    def __init__(self, broker: Broker) -> None:
        self._client = _native.LeaseClient(broker.socket, "other")
        self._pool = ThreadPoolExecutor(1)

    def ask(self, size: int, wait: float) -> Future[tuple[int, int, dict[str, int]]]:
        """Ask for memory, and go on meanwhile."""
        return self._pool.submit(
            lambda: self._client.acquire({"host": size}, None, 0, wait, None, None)
        )

    def give_back(self, lease: int) -> None:
        """Let go of it."""
        self._client.release(lease)
        self._pool.shutdown()


@pytest.fixture
def fitted(idle_broker: Broker) -> memfit.Fitted:
    """A step that needs no plan, in a lease that leaves the broker nothing."""
    step = workload()
    peak = memfit.predict(step).predicted_peak_bytes
    besides = elastic.besides_of(step, "host")
    idle_broker.start(memory=f"host={besides + 4 * peak}")
    # Apart from tensors the process may take less later: a floor of half of it stays below.
    lease = memfit.lease(besides + 4 * peak, floor=besides // 2)
    return memfit.fit(step, lease=lease, forbid=["fuse_optimizer"])


def test_a_lease_gives_way_within_a_step_and_comes_back_and_the_results_are_the_same_bits(
    fitted: memfit.Fitted, idle_broker: Broker
) -> None:
    follower = fitted.elastic
    assert follower is not None
    lease, whole = follower.lease, follower.lease.bytes
    twin = memfit.fit(workload(), "100GiB")
    peak = memfit.predict(fitted.workload).predicted_peak_bytes
    torch.manual_seed(1)
    expected = [twin.step() for _ in range(6)]
    torch.manual_seed(1)
    losses = [fitted.step(), fitted.step()]
    assert fitted.plan.actions == ()

    # Another needs so much that the step has to do with two thirds of what it takes.
    other = Other(idle_broker)
    waits = other.ask(whole - follower.besides_bytes - peak * 2 // 3, 60)
    until(lambda: lease.asked is not None)
    losses.append(fitted.step())
    granted, _, _ = waits.result(timeout=10)
    assert lease.bytes == follower.besides_bytes + peak * 2 // 3
    assert fitted.plan.actions != ()
    assert (follower.shrunk, follower.declined) == (1, 0)
    static = static_tensors(fitted.workload, fitted.optimizer)
    measured = measure_peak(lambda: losses.append(fitted.step()), static).peak_bytes
    assert measured <= follower.budget_bytes < peak

    other.give_back(granted)
    time.sleep(elastic.GROW_EVERY)
    losses += [fitted.step(), fitted.step()]
    assert lease.bytes == whole
    assert follower.grown == 1
    assert fitted.plan.actions == ()
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    for name, value in state(twin).items():
        assert torch.equal(value, state(fitted)[name]), name


def test_a_step_that_cannot_do_with_so_little_gives_what_it_can_and_goes_on(
    fitted: memfit.Fitted, idle_broker: Broker
) -> None:
    follower = fitted.elastic
    assert follower is not None
    whole = follower.lease.bytes
    waits = Other(idle_broker).ask(whole - follower.besides_bytes - 1000, 4.0)
    until(lambda: follower.lease.asked is not None)
    fitted.step()
    with pytest.raises(memfit.LeaseError, match="no room"):
        waits.result(timeout=30)
    minimum = fitted.plan.minimum_peak_bytes
    assert minimum <= follower.budget_bytes < whole - follower.besides_bytes
    fitted.step()


def test_a_lease_without_a_floor_is_left_as_it_is(idle_broker: Broker) -> None:
    step = workload()
    size = elastic.besides_of(step, "host") + 2 * memfit.predict(step).predicted_peak_bytes
    idle_broker.start(memory=f"host={size}")
    fitted = memfit.fit(step, lease=memfit.lease(size))
    assert fitted.elastic is not None
    waits = Other(idle_broker).ask(size // 2, 0.3)
    for _ in range(2):
        fitted.step()
    with pytest.raises(memfit.LeaseError):
        waits.result(timeout=30)
    assert fitted.elastic.lease.bytes == size
    assert fitted.elastic.shrunk == 0


def test_alone_a_lease_bounds_the_step_as_a_budget_does(idle_broker: Broker) -> None:
    del idle_broker
    step = workload()
    peak = memfit.predict(step).predicted_peak_bytes
    size = elastic.besides_of(step, "host") + peak * 3 // 4
    with pytest.warns(memfit.NoBrokerWarning):
        lease = memfit.lease(size)
    with lease:
        fitted = memfit.fit(step, lease=lease)
        fitted.step()
    assert fitted.plan.actions
    assert fitted.plan.budget_bytes < peak


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda lease: memfit.fit(workload()), "give a `budget`, or a `lease`"),
        (lambda lease: memfit.fit(workload(), "1GiB", lease=lease), "give a `budget`, or a"),
        (lambda lease: memfit.fit(workload(), lease=lease, compile=True), "compiled"),
        (lambda lease: memfit.fit(workload(), lease=lease), "in addition to the step"),
    ],
)
def test_a_lease_that_cannot_be_lived_in_is_refused_with_the_numbers(
    idle_broker: Broker, make: Callable[[memfit.Lease], memfit.Fitted], words: str
) -> None:
    idle_broker.start()
    with memfit.lease(1000) as lease, pytest.raises(memfit.UsageError, match=words):
        make(lease)
