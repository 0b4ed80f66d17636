"""The guard on CUDA: against a stand-in for a device's numbers, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.guard import cuda_limit
from memfit.share.park.cuda_memory import CudaMemory
from memfit.track.steps import STEPS

GIB, MIB = 1 << 30, 1 << 20


@dataclass
class StandIn:
    """One device of 8 GiB: what torch and the driver would say of it."""

    total: int = 8 * GIB
    past_torch: int = 300 * MIB
    reserved: int = 0
    allocated: int = 0
    share: float = 0.75
    emptied: int = 0
    blocks: list[dict[str, Any]] = field(default_factory=list)

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        def set_share(share: float, device: Any) -> None:
            assert isinstance(share, float)
            assert 0 <= share <= 1
            self.share = share

        def empty() -> None:
            self.emptied += 1
            self.reserved = self.allocated

        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "mem_get_info": lambda _: (self.total - self.past_torch - self.reserved, self.total),
            "memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: self.allocated,
            "get_per_process_memory_fraction": lambda _: self.share,
            "set_per_process_memory_fraction": set_share,
            "empty_cache": empty,
            "memory_snapshot": lambda: [{"device": 0, "blocks": self.blocks}],
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)

    @property
    def allowed(self) -> int:
        """Bytes that torch would reserve at most, as it computes them."""
        return int(self.share * self.total)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    stand_in.put_in(monkeypatch)
    return stand_in


def refused(requested: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of 8.00 "
        "GiB of which 6.00 GiB is free. 2.00 GiB allowed; Of the allocated memory 1.00 GiB is "
        "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )


def test_torchs_share_is_the_budget_less_what_is_taken_past_it(device: StandIn):
    with memfit.guard("2GiB", device="cuda") as guard:
        assert 0 <= 2 * GIB - 300 * MIB - device.allowed <= 1
        assert guard.in_use_bytes == 300 * MIB
    assert device.share == 0.75


@pytest.mark.parametrize("budget", [1_000_000_007, 3 * GIB + 1, 5 * GIB - 3, 400 * MIB + 77])
def test_the_share_never_allows_a_byte_more(device: StandIn, budget: int):
    device.total = 84_987_740_160
    with memfit.guard(budget, device="cuda:0"):
        assert 0 <= budget - 300 * MIB - device.allowed <= 16


def test_the_share_follows_a_budget_that_changes_and_stays_where_more_is_in_use(
    device: StandIn,
):
    limit = cuda_limit.CudaLimit(2 * GIB, torch.device("cuda", 0))
    limit.set()
    device.reserved, device.allocated = GIB, 200 * MIB
    limit.change(700 * MIB)
    assert device.emptied == 1
    assert 0 <= 400 * MIB - device.allowed <= 1
    with pytest.raises(memfit.BudgetError, match=r"more than the budget of 400\.0 MiB"):
        limit.change(400 * MIB)
    assert limit.budget_bytes == 700 * MIB
    assert 0 <= 400 * MIB - device.allowed <= 1
    limit.change(3 * GIB)
    assert 0 <= 3 * GIB - 300 * MIB - device.allowed <= 1
    limit.end()
    assert device.share == 0.75


def test_a_share_set_before_is_never_widened_and_is_restored(device: StandIn):
    device.share = 0.125
    with memfit.guard("4GiB", device="cuda"):
        assert device.share == 0.125
        with memfit.guard("700MiB", device="cuda"):
            assert 0 <= 400 * MIB - device.allowed <= 1
        assert device.share == 0.125
    assert device.share == 0.125


def test_what_grows_past_torch_shrinks_its_share_at_the_next_step(device: StandIn):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    with memfit.guard("2GiB", device="cuda"):
        device.past_torch = 500 * MIB
        optimizer.step()
        assert 0 <= 2 * GIB - 500 * MIB - device.allowed <= 1
        device.past_torch = 3 * GIB
        optimizer.step()
        assert device.allowed == 0
    device.past_torch = 300 * MIB
    optimizer.step()
    assert device.share == 0.75
    assert cuda_limit._refresh not in STEPS.listeners


def test_what_a_parked_model_takes_past_torch_is_measured_when_it_comes_and_goes(
    device: StandIn,
):
    def moves(by: int) -> Callable[[], None]:
        def move() -> None:
            device.past_torch += by

        return move

    memory = CudaMemory.__new__(CudaMemory)
    memory._device = torch.device("cuda:0")
    memory._memory = SimpleNamespace(wake=moves(GIB), park=lambda _: moves(-GIB)())
    memory._host_bytes = None
    with memfit.guard("2GiB", device="cuda"):
        memory.wake()
        assert 0 <= GIB - 300 * MIB - device.allowed <= 1
        memory.park()
        assert 0 <= 2 * GIB - 300 * MIB - device.allowed <= 1


def test_of_overlapping_guards_the_tightest_counts_in_whatever_order_they_end(device: StandIn):
    wide, tight = memfit.guard("3GiB", device="cuda"), memfit.guard("1GiB", device="cuda")
    wide.__enter__()
    tight.__enter__()
    wide.__exit__(None, None, None)
    assert 0 <= GIB - 300 * MIB - device.allowed <= 1
    tight.__exit__(None, None, None)
    assert device.share == 0.75


def test_a_budget_below_what_is_taken_is_refused_and_unused_blocks_go_first(device: StandIn):
    device.reserved = device.allocated = 2 * GIB
    with pytest.raises(memfit.BudgetError, match="`cuda:0` are taken"):
        memfit.guard("1GiB", device="cuda").__enter__()
    assert device.share == 0.75
    device.allocated = 100 * MIB
    with memfit.guard("1GiB", device="cuda"):
        assert device.emptied == 1
    for wrong in ("cuda:1", "meta"):
        with pytest.raises(memfit.UsageError):
            memfit.guard("1GiB", device=wrong)
    with pytest.raises(memfit.UsageError, match="backstop"):
        memfit.guard("1GiB", device="cuda", backstop="1GiB")


def test_torchs_error_becomes_one_to_act_on(device: StandIn):
    device.reserved = GIB
    device.blocks = [
        {"address": 4096 * k, "requested_size": 100 * MIB, "state": "active_allocated"}
        for k in range(1, 4)
    ]
    device.blocks.append({"address": 1, "requested_size": GIB, "state": "inactive"})
    with pytest.raises(memfit.OutOfBudget) as caught, memfit.guard("2GiB", device="cuda"):
        raise refused("1.50 GiB")
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert error.device == "cuda:0"
    assert error.requested_bytes == 3 * GIB // 2
    assert error.in_use_bytes == GIB + 300 * MIB
    assert error.budget_bytes == 2 * GIB
    assert [(h.bytes, h.blocks) for h in error.holders] == [(300 * MIB, 3)]
    assert "CUDA out of memory. Tried to allocate" in str(error)
    assert device.share == 0.75


def test_a_device_that_is_full_by_itself_is_not_the_budgets_doing(device: StandIn):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
    with pytest.raises(torch.OutOfMemoryError) as caught, memfit.guard("2GiB", device="cuda"):
        raise full
    assert caught.value is full


@pytest.mark.gpu
def test_a_gpu_refuses_what_is_above_the_budget():
    keep = torch.empty(MIB, device="cuda")
    before = torch.cuda.get_per_process_memory_fraction()
    in_use = memfit.guard("16GiB", device="cuda").in_use_bytes
    with pytest.raises(memfit.OutOfBudget) as caught:  # noqa: SIM117
        with memfit.guard(in_use + 256 * MIB, device="cuda") as guard:
            [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
    assert caught.value.in_use_bytes <= guard.budget_bytes
    assert guard.budget_bytes - caught.value.in_use_bytes < 64 * MIB
    assert torch.cuda.get_per_process_memory_fraction() == before
    assert keep.is_cuda


@pytest.mark.gpu
def test_a_guarded_gpu_step_is_recovered():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(12)))
    work = memfit.Workload(
        model=net.cuda(),
        batch=torch.randn(16_384, 1024, device="cuda"),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    limit = memfit.guard("64GiB", device="cuda")
    peak = int(memfit.predict(work).predicted_peak_bytes)
    fitted = memfit.fit(work, limit.in_use_bytes + int(peak * 1.3), guard=True)
    ballast = torch.empty(peak // 2, dtype=torch.uint8, device="cuda")
    with pytest.warns(memfit.RecoveryWarning):
        fitted.step()
    assert fitted.report().recovered_steps == 1
    fitted.close()
    assert ballast.is_cuda
