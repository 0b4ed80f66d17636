"""Capturing leaves the model, its gradients, its hooks and the random state as they were."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from memfit.capture import record_pair
from memfit.capture.stage.fake import preserved_random_state
from memfit.workload import Workload


class Model(nn.Module):
    def __init__(self, branches):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.branches = branches

    def forward(self, x):
        y = self.norm(self.linear(x + torch.rand_like(x)))
        if self.branches and y.sum().item() > 1e9:
            return y
        return torch.dropout(y, 0.5, train=True)


def numpy_state():
    return np.random.get_state()[1].tolist()


@pytest.mark.parametrize("branches", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_no_trace(branches, fails):
    model = Model(branches)
    model(torch.randn(4, 8)).sum().backward()
    calls = []
    model.linear.register_forward_hook(lambda *_: calls.append(1))
    batch = {"x": torch.randn(4, 8)}
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    held = [id(p.grad) for p in model.parameters()]
    batch_before = batch["x"].clone()
    states = torch.get_rng_state(), random.getstate(), numpy_state()

    def loss(model, batch):
        batch["x"].add_(1)
        random.random()
        np.random.rand()
        if fails:
            raise KeyError("mine")
        return model(batch["x"]).mean()

    workload = Workload(model, batch, loss, lambda params: torch.optim.SGD(params, lr=0.1))
    if fails:
        with pytest.raises(Exception, match="mine"):
            record_pair(workload)
    else:
        record_pair(workload)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(p.grad) for p in model.parameters()] == held
    assert all(
        torch.equal(p.grad, gradient)
        for p, gradient in zip(model.parameters(), gradients, strict=True)
    )
    assert torch.equal(batch["x"], batch_before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy_state() == states[2]
    assert len(model.linear._forward_hooks) == 1
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_random_states_of_gpus_in_use_are_put_back(monkeypatch):
    put_back = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["first", "second"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.append)
    with pytest.raises(ZeroDivisionError), preserved_random_state():
        raise ZeroDivisionError
    assert put_back == [["first", "second"]]
