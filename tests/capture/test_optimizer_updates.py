"""What is known about each parameter's own update."""

from __future__ import annotations

import pytest
import torch
from small_examples import small_example

from memfit.capture import record
from memfit.tensors.sliced_update import LEAST_BYTES, MOST_BYTES


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


def test_adamw_needs_two_temporaries_of_a_parameters_size_or_of_a_slices():
    trace = record(small_example("gpt2"), probe=False)
    for update in trace["updates"]:
        size = trace["allocations"][update["parameter"]]["bytes"]
        cut = size if size < 2 * LEAST_BYTES else MOST_BYTES
        assert min(size, LEAST_BYTES) <= update["temporary_bytes"] <= 2 * cut + 64
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


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1),
    ],
    ids=["Adam", "AdamW", "Adam with amsgrad", "SGD with momentum", "plain SGD"],
)
def test_each_updates_state_is_what_the_optimizer_holds_for_the_parameter(optimizer):
    workload = small_example("gpt2", layers=1)
    workload.optimizer = optimizer
    trace = record(workload, probe=False)
    real = small_example("gpt2", layers=1)
    stepped = optimizer(real.model.parameters())
    real.loss(real.model, real.batch).backward()
    stepped.step()
    held = {
        name: sum(
            value.untyped_storage().nbytes()
            for value in stepped.state[parameter].values()
            if isinstance(value, torch.Tensor)
        )
        for name, parameter in real.model.named_parameters()
    }
    allocations = trace["allocations"]
    recorded = {
        trace["strings"][allocations[update["parameter"]]["name"]]: sum(
            allocations[state]["bytes"] for state in update["state"]
        )
        for update in trace["updates"]
    }
    assert recorded == held
    states = [state for update in trace["updates"] for state in update["state"]]
    assert len(states) == len(set(states))
    assert {allocations[state]["category"] for state in states} <= {"optimizer_state"}


def test_state_that_two_parameters_share_is_no_ones():
    class Shared(torch.optim.SGD):
        def step(self, closure=None):
            shared = torch.zeros(7)
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("shared", shared)
                    state.setdefault("own", torch.zeros(3))
            return super().step(closure)

    workload = small_example("gpt2", layers=1)
    workload.optimizer = lambda params: Shared(params, lr=0.1)
    trace = record(workload, probe=False)
    for update in trace["updates"]:
        assert [trace["allocations"][state]["bytes"] for state in update["state"]] == [12]
