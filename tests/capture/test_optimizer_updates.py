"""What is known about each parameter's own update."""

from __future__ import annotations

import pytest
import torch
from small_examples import small_example

from memfit.capture import record


def test_every_trained_parameter_has_an_update_in_order_of_readiness():
    trace = record(small_example("gpt2"), probe=False)
    updates = trace["updates"]
    parameters = [
        index for index, a in enumerate(trace["allocations"]) if a["category"] == "parameter"
    ]
    assert sorted(update["parameter"] for update in updates) == parameters
    assert [update["ready"] for update in updates] == sorted(u["ready"] for u in updates)
    phases = [op["phase"] for op in trace["ops"]]
    first, end = phases.index("backward"), phases.index("optimizer")
    for update in updates:
        gradient = trace["allocations"][update["gradient"]]
        assert gradient["category"] == "gradient"
        assert first < update["ready"] <= end
        assert gradient["natural"][0][0] < update["ready"]
        assert gradient["bytes"] == trace["allocations"][update["parameter"]]["bytes"]


def test_adamw_needs_two_temporaries_of_a_parameters_size():
    trace = record(small_example("gpt2"), probe=False)
    for update in trace["updates"]:
        size = trace["allocations"][update["parameter"]]["bytes"]
        assert size <= update["temporary_bytes"] <= 2 * size + 64
        assert update["moved_bytes"] > 4 * size


def test_plain_sgd_needs_none():
    workload = small_example("gpt2")
    workload.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    trace = record(workload, probe=False)
    assert {update["temporary_bytes"] for update in trace["updates"]} == {0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"clip_grad_norm": 1.0}, "gradient clipping needs all gradients at once"),
        (
            {"optimizer": torch.optim.ASGD},
            "`ASGD` is not known to update each parameter on its own",
        ),
        ({"optimizer": None}, "the workload has no optimizer"),
    ],
)
def test_refusals_name_the_reason(change, reason):
    workload = small_example("gpt2", layers=1)
    for name, value in change.items():
        setattr(workload, name, value)
    assert record(workload, probe=False)["meta"]["fused_optimizer_refusal"] == reason


def test_a_subclass_is_not_trusted():
    class MyAdam(torch.optim.AdamW):
        pass

    workload = small_example("gpt2", layers=1)
    workload.optimizer = MyAdam
    refusal = record(workload, probe=False)["meta"]["fused_optimizer_refusal"]
    assert refusal == "`MyAdam` is not known to update each parameter on its own"
