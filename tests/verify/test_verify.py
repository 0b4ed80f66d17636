"""Verification tells a plan that keeps its word from one that does not."""

from __future__ import annotations

import pytest
import torch
import workloads
from handmade import record
from torch import nn

import memfit
from memfit.measure import calibrate, paired_cpu_seconds
from memfit.measure.peak import storage_bytes
from memfit.run import fitted as fitted_module
from memfit.run.profile import _with_rest, profile_ops
from memfit.verify.eager import verify
from memfit.workload import Workload


def factory():
    layers = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Sigmoid(), nn.Dropout(0.1)]
    return Workload(
        nn.Sequential(*layers),
        torch.randn(512, 64),
        lambda m, b: m(b).pow(2).mean(),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
    )


def remat_plan(drop=lambda m: "bernoulli" not in m.name):
    load = factory()
    return record(load.model, lambda: load.loss(load.model, load.batch)).plan(drop)


BITWISE = {"agreement": "bitwise", "max_relative_error": 0.0}


def test_an_exact_plan_is_bitwise_and_lower():
    result = verify(factory, remat_plan(lambda m: m.op < 20), steps=1)
    for what in ("loss", "gradients", "parameters", "buffers"):
        assert result[what] == BITWISE, what
    assert result["divergence"] == ""
    assert result["kept_drops"] == []
    assert (
        result["planned"]["measured_peak_bytes"] < 0.9 * result["unplanned"]["measured_peak_bytes"]
    )
    assert result["planned"]["step_cpu_seconds"] > 0


def test_the_random_state_of_the_process_is_put_back():
    plan = remat_plan()
    before = torch.get_rng_state()
    verify(factory, plan, steps=1)
    assert torch.equal(before, torch.get_rng_state())


def test_micro_batches_are_equivalent():
    def no_dropout():
        load = factory()
        load.model = nn.Sequential(
            *(m for m in load.model if not isinstance(m, (nn.Dropout, nn.BatchNorm1d)))
        )
        return load

    plan = {"actions": [{"kind": "micro_batch", "promise": "equivalent", "count": 4, "bytes": 0}]}
    result = verify(no_dropout, plan, steps=1)
    assert result["gradients"]["agreement"] == "equivalent"
    assert 0 < result["gradients"]["max_relative_error"] <= 1e-5


def test_a_plan_that_changes_the_numbers_is_told():
    plan = {"actions": [{"kind": "micro_batch", "promise": "equivalent", "count": 2, "bytes": 0}]}
    result = verify(factory, plan, steps=1)  # batch normalisation, so not the same
    assert result["gradients"]["agreement"] == "different"
    assert result["gradients"]["max_relative_error"] > 1e-3


def test_the_optimizer_inside_backward_is_bitwise():
    plan = {"actions": [{"kind": "fuse_optimizer", "promise": "exact", "count": 1, "bytes": 0}]}
    result = verify(factory, plan, steps=1)
    for what in ("loss", "gradients", "parameters", "buffers"):
        assert result[what] == BITWISE, what


def test_an_optimizer_that_has_its_state_already():
    def warm():
        load = factory()
        optimizer = torch.optim.AdamW(load.model.parameters(), lr=1e-2)
        load.loss(load.model, load.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        load.optimizer = optimizer
        return load

    assert verify(warm, remat_plan(), steps=1)["parameters"] == BITWISE


def test_inference():
    result = verify(lambda: Workload(nn.Linear(4, 4), torch.randn(2, 4)), {"actions": []}, steps=1)
    assert result["loss"] == BITWISE
    assert result["gradients"] == BITWISE


def test_pairs_alternate_and_give_medians():
    order = []
    seconds = paired_cpu_seconds(lambda: order.append("a"), lambda: order.append("b"), 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert all(s >= 0 for s in seconds)


def test_storages_are_counted_once():
    x = torch.zeros(10)
    assert storage_bytes([x, x.view(5, 2), x[3:], torch.zeros(2)]) == 48


def test_this_machine_has_a_profile():
    profile = calibrate()
    assert profile["name"]
    assert profile["flops_per_second"]["float32"] > 1e8
    assert profile["flops_per_second"]["bfloat16"] > 1e6
    assert profile["flops_per_second"]["float16"] > 1e6
    assert profile["bytes_per_second"] > 1e8
    assert 1e-8 < profile["op_overhead_seconds"] < 1e-3
    if "new_memory_bytes_per_second" in profile:  # not where the C library keeps what is freed
        assert 1e7 < profile["new_memory_bytes_per_second"] < 1e11


def _trace(load):
    from memfit.capture import record as capture_record

    return capture_record(load)


def test_every_op_of_a_trace_gets_its_seconds():
    load = factory()
    before = [t.clone() for t in (*load.model.parameters(), *load.model.buffers())]
    trace = _trace(load)
    seconds = profile_ops(load, trace)
    assert len(seconds) == len(trace["ops"])
    assert all(s > 0 for s in seconds)
    names = [trace["strings"][op["name"]] for op in trace["ops"]]
    by_name = dict(zip(names, seconds, strict=True))
    assert by_name["aten.addmm.default"] > by_name["aten.t.default"]
    after = [*load.model.parameters(), *load.model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_a_step_takes_beside_its_ops_is_theirs_by_what_they_make():
    sizes = [0, 3_000_000, 1_000_000]
    trace = {
        "allocations": [
            {"producer": None, "bytes": 5_000_000},
            *({"producer": op, "bytes": size} for op, size in enumerate(sizes) if size),
        ]
    }
    ops = [0.001, 0.002, 0.003]
    assert _with_rest(trace, ops, 0.0) == ops
    little = _with_rest(trace, ops, 3e-6)
    assert [b - a for a, b in zip(ops, little, strict=True)] == pytest.approx([1e-6] * 3)
    much = _with_rest(trace, ops, 0.4 + 3e-5)
    assert [b - a for a, b in zip(ops, much, strict=True)] == pytest.approx(
        [1e-5, 0.3 + 1e-5, 0.1 + 1e-5]
    )


def test_a_step_that_does_not_fit_is_timed_on_fewer_examples(monkeypatch):
    load = factory()
    trace = _trace(load)
    batches = []
    step = fitted_module.Fitted.step

    def watched(self, batch=None):
        batches.append(self.workload.batch.shape[0])
        return step(self, batch)

    monkeypatch.setattr(fitted_module.Fitted, "step", watched)
    seconds = profile_ops(load, trace, available_bytes=2_000_000)
    assert set(batches) < set(range(1, 512))
    assert len(seconds) == len(trace["ops"])
    with pytest.raises(fitted_module.UsageError, match="are free"):
        profile_ops(load, trace, available_bytes=1000)


def test_a_workload_is_verified_and_left_as_it_was():
    workload = workloads.mlp()
    before = [p.detach().clone() for p in workload.model.parameters()]
    for parameter in workload.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    found = memfit.verify(workload, "90%", steps=1)
    assert found.holds
    assert found.verdict == "fits"
    assert found.loss.agreement == found.gradients.agreement == "bitwise"
    assert found.planned.measured_peak_bytes <= found.budget_bytes
    assert all(action.promise == "exact" for action in found.plan.actions)
    assert "bitwise equal" in str(found)
    assert "text" not in found.as_dict()
    for mine, was in zip(workload.model.parameters(), before, strict=True):
        assert torch.equal(mine, was)
        assert torch.equal(mine.grad, torch.full_like(mine, 3.0))


def test_a_plan_that_was_made_is_verified():
    made = memfit.plan(workloads.mlp(), "90%")
    found = memfit.verify(workloads.mlp, plan=made, steps=1)
    assert found.holds
    assert found.budget_bytes == made.budget_bytes
    with pytest.raises(memfit.UsageError, match="give a `budget`, or a `plan`"):
        memfit.verify(workloads.mlp)


def test_where_no_plan_fits_nothing_runs():
    found = memfit.verify(workloads.mlp, "1000B", steps=1)
    assert (found.verdict, found.holds, found.loss) == ("does_not_fit", None, None)
