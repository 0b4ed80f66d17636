"""How a loss reduces over the batch, as far as it can be told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.capture import record_pair
from memfit.workload import Workload


def labels(y):
    return torch.tensor([1, 2, -100, 4])[torch.arange(y.shape[0]) % 4]


CASES = {
    "cross entropy": (lambda y: functional.cross_entropy(y, labels(y)), "token_mean"),
    "summed cross entropy": (
        lambda y: functional.cross_entropy(y, labels(y), reduction="sum"),
        "sum",
    ),
    "weighted cross entropy": (
        lambda y: functional.cross_entropy(y, labels(y), weight=torch.ones(8)),
        "",
    ),
    "mean": (lambda y: y.pow(2).mean(), "mean"),
    "sum": (lambda y: y.pow(2).sum(), "sum"),
    "mean over all dimensions": (lambda y: y.pow(2).mean((0, 1)), "mean"),
    "mean of a sum": (lambda y: y.sum(1).mean(), "mean"),
    "mean over features only": (lambda y: y.mean(1)[0], ""),
    "sum over the batch, then a mean": (lambda y: y.sum(0).mean(), ""),
    "mean squared error": (lambda y: functional.mse_loss(y, torch.zeros_like(y)), "mean"),
    "scaled mean": (lambda y: 0.3 * y.mean(), "mean"),
    "mean times batch": (lambda y: y.mean() * y.shape[0], ""),
    "sum over batch": (lambda y: y.sum() / y.shape[0], ""),
    "two means": (lambda y: y.mean() + y.pow(2).mean(), "mean"),
    "mean and sum": (lambda y: y.mean() + y.pow(2).sum(), ""),
    "something else": (lambda y: y.mean().exp(), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_reduction(name):
    reduce, expected = CASES[name]
    workload = Workload(
        model=nn.Linear(8, 8),
        batch=torch.randn(4, 8),
        loss=lambda model, batch: reduce(model(batch)),
    )
    first, _ = record_pair(workload, probe=False)
    assert first["meta"]["loss_reduction"] == expected
