"""A forward that leaves its plan: gradients stay right, and it is told once."""

from __future__ import annotations

import warnings

import pytest
import torch
from dropout_blocks import Stack, compare
from handmade import record
from torch import nn

from memfit.apply.remat.remat import Rematerialiser
from memfit.errors import DivergenceWarning, ReplayError


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 8)


class Branches(nn.Module):
    """Takes another branch when told to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.other = False

    def forward(self, x):
        x = self.first(x).sigmoid()
        x = self.middle(x)
        x = x.sin().mul_(2.0).tanh() if self.other else x.cos().mul_(3.0).sigmoid()
        return self.last(x).tanh().sum()


@pytest.mark.parametrize("watched", [None, [("first", 0), ("last", 0)]])
def test_another_branch_gives_right_gradients_and_one_warning(x, watched):
    model = Branches()
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat(regions=watched))
    model.other = True
    if watched is None:
        with pytest.warns(DivergenceWarning, match=r"aten\.sin\.default"):
            compare(model, lambda: model(x), remat)
        assert remat.diverged
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(model, lambda: model(x), remat)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(model, lambda: model(x), remat)
        assert not remat.diverged
    model.other = False
    compare(model, lambda: model(x), remat)
    assert not remat.diverged


def test_watching_resumes_at_the_next_region(x):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Branches()
            self.b = Branches()

        def forward(self, x):
            return self.a(x) + self.b(x)

    model = Two()
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(regions=[("a", 0), ("b", 0)]))
    whole = compare(model, lambda: model(x), remat).observations.dropped_saves
    model.a.other = True
    with pytest.warns(DivergenceWarning):
        partly = compare(model, lambda: model(x), remat).observations.dropped_saves
    assert whole > partly > whole / 2


def test_a_few_other_ops_are_passed_over(x):
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))
            self.extra = False

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = layer(x).sigmoid() + x
                if self.extra and index == 3:
                    x = x.sin() * 2.0
            return x.sum()

    model = Long()
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())
    whole = compare(model, lambda: model(x), remat).observations.dropped_saves
    model.extra = True
    with pytest.warns(DivergenceWarning):
        outcome = compare(model, lambda: model(x), remat)
    assert remat.diverged
    assert whole - 5 <= outcome.observations.dropped_saves < whole


def test_a_larger_batch_is_still_dropped_and_told(x):
    model = Stack()
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())
    smaller = x[:3]
    compare(model, lambda: model(smaller), remat)
    assert not remat.diverged
    larger = torch.cat([x, x])
    with pytest.warns(DivergenceWarning, match="elements instead"):
        outcome = compare(model, lambda: model(larger), remat)
    assert remat.diverged
    assert outcome.observations.dropped_saves > 10


def test_a_write_outside_the_watched_regions_is_noticed(x):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(8, 8), nn.Identity())
            self.b = nn.Sequential(nn.Tanh(), nn.Linear(8, 1))
            self.write = False

        def forward(self, x):
            h = self.a(x)
            if self.write:
                h.mul_(3.0)
            return self.b(h).sum()

    model = Writes()
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(regions=[("a", 0), ("b", 0)]))
    compare(model, lambda: model(x), remat)
    model.write = True
    with pytest.warns(DivergenceWarning, match="outside the ops"):
        compare(model, lambda: model(x), remat)


def test_a_parameter_changed_before_backward_is_refused(x):
    model = Stack()
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())
    with remat.forward():
        loss = model(x)
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2.0)
    with pytest.raises((ReplayError, RuntimeError), match=r"written to|modified by an inplace"):
        loss.backward()
