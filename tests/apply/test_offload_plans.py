"""Plans that offload or let pass, from the planner to real steps: same bits, within the budget."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.plan import planner

WIDTH, ROWS, DEPTH = 128, 96, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build():
    torch.manual_seed(0)
    model = Stack()
    batch = torch.randn(ROWS, WIDTH)
    return memfit.Workload(
        model,
        batch,
        lambda m, b: m(b).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def unplanned():
    """Loss and parameters after two steps without a plan."""
    workload = build()
    losses = []
    for _ in range(2):
        loss = workload.loss(workload.model, workload.batch)
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(workload.model.parameters())


def kinds(plan):
    return {action["kind"]: action for action in plan["actions"]}


def step_is_the_same(budget, **options):
    """The plan, after its two steps were compared with the unplanned ones."""
    workload = build()
    with memfit.fit(workload, budget, **options) as fitted:
        plan = fitted.plan.as_dict()
        first = fitted.step()
        static = static_tensors(workload, fitted.optimizer)
        losses = []
        measured = measure_peak(lambda: losses.append(fitted.step()), static)
    expected, parameters = unplanned()
    assert torch.equal(first, expected[0])
    assert torch.equal(losses[0], expected[1])
    for mine, theirs in zip(workload.model.parameters(), parameters, strict=True):
        assert torch.equal(mine, theirs)
    assert measured.peak_bytes <= plan["planned"]["predicted_peak_bytes"]
    assert measured.peak_bytes <= plan["budget_bytes"]
    return plan


def test_a_plan_offloads_where_nothing_may_be_computed_again(tmp_path):
    forbid = ["remat", "micro_batch"]
    plan = step_is_the_same("70%", offload=tmp_path, forbid=forbid)
    offload = kinds(plan)["offload"]
    assert offload["promise"] == "exact"
    assert offload["offload"]["folder"] == str(tmp_path)
    assert sorted(offload["offload"]["order"]) == list(range(offload["count"]))
    assert list(tmp_path.iterdir()) == []


def test_offloading_reaches_lower_than_computing_again_alone(tmp_path):
    forbid = ["micro_batch", "offload_parameters"]
    trace = memfit.trace(build())
    alone = memfit.plan(trace, "1%", forbid=forbid).minimum_peak_bytes
    both = memfit.plan(trace, "1%", forbid=forbid, offload=tmp_path).minimum_peak_bytes
    assert both < alone
    plan = step_is_the_same(both + plan_margin(trace), offload=tmp_path, forbid=forbid)
    assert "offload" in kinds(plan)


def test_where_bytes_are_short_a_chain_of_blocks_is_computed_more_than_once():
    trace = memfit.trace(build())
    forbid = ["micro_batch"]
    least = memfit.plan(trace, "1%", forbid=forbid).minimum_peak_bytes
    plan = step_is_the_same(least + plan_margin(trace), forbid=forbid)
    drops = kinds(plan)["remat"]["remat"]["drops"]
    assert any(drop.get("home") is not None for drop in drops)


def plan_margin(trace):
    """What plans keep free below a budget."""
    return json.loads(memfit.plan(trace, "100%").json())["margin_bytes"]


def test_a_place_that_is_slow_is_used_less(tmp_path, monkeypatch):
    trace = memfit.trace(build())
    counts = []
    for rate in (1e12, 1e6):
        found = {"tier": "disk", "folder": str(tmp_path)}
        rates = {"write_bytes_per_second": rate, "read_bytes_per_second": rate}
        monkeypatch.setattr(planner, "offer", lambda *_, o=found | rates: o)
        plan = memfit.plan(trace, "60%", offload=tmp_path).as_dict()
        counts.append(kinds(plan).get("offload", {"bytes": 0})["bytes"])
    assert counts[0] > counts[1]


def test_the_hosts_memory_is_no_place_for_a_step_that_runs_there():
    with pytest.raises(UsageError, match="runs in the host's memory"):
        memfit.plan(memfit.trace(build()), "60%", offload="host")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        memfit.plan(memfit.trace(build()), "60%", offload=tmp_path / "missing")


def test_a_time_limit_gives_a_plan_within_the_budget():
    plan = memfit.plan(memfit.trace(build()), "60%", time_limit=0.05)
    assert plan.fits
    with pytest.raises(UsageError, match="time_limit"):
        memfit.plan(memfit.trace(build()), "60%", time_limit=0)
