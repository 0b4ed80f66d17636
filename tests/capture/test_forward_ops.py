"""The forward ops of a trace are those of the real forward, one by one."""

from __future__ import annotations

import pytest
import torch
from small_examples import SMALL, small_example
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture import record


class CountingMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in {"prim", "profiler"}:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def real_forward_ops(workload):
    # With the hooks that an executor needs anyway: without them autograd detaches saved outputs.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks, CountingMode() as mode:
        workload.loss(workload.model, workload.batch)
    return mode.names


@pytest.mark.parametrize("name", SMALL)
def test_recorded_forward_is_the_real_forward(name):
    workload = small_example(name)
    trace = record(workload, probe=False)
    recorded = [trace["strings"][op["name"]] for op in trace["ops"] if op["phase"] == "forward"]
    assert recorded == real_forward_ops(workload)
    assert trace["meta"]["captured"] == "fake"


def test_padding_is_seen_by_its_values():
    padded = small_example("bert")
    full = small_example("bert")
    full.batch["attention_mask"].fill_(1)
    for workload in (padded, full):
        trace = record(workload, probe=False)
        recorded = [trace["strings"][op["name"]] for op in trace["ops"] if op["phase"] == "forward"]
        assert recorded == real_forward_ops(workload)
    assert real_forward_ops(padded) != real_forward_ops(full)
