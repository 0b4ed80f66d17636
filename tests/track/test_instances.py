"""Python's objects by class: those of the collector's, and nodes of functions written in Python."""

import gc
import weakref

import pytest
import torch
from torch import nn

from memfit import _native
from memfit.track import cycles
from memfit.track.live_objects import instances


class _Proxy:
    """Warns, as some of torch's do, when it is asked for its class."""

    @property
    def __class__(self) -> type:
        raise AssertionError("an object was asked for its class")


def test_instances_are_told_by_their_type_alone() -> None:
    """In their order, derived classes too; proxies are what they are, whatever they say."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    objects = [_Proxy(), model[1], 3, "x", model, torch.ones(1), weakref.proxy(model), model[0], []]
    found = _native.instances(objects, (nn.Module, list))
    assert [id(one) for one in found] == [id(objects[place]) for place in (1, 4, 7, 8)]
    assert _native.instances([], (nn.Module,)) == []


def test_all_live_modules_are_found() -> None:
    """Those that the garbage collector knows, as a look at each shows them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    expected = {id(one) for one in gc.get_objects() if issubclass(type(one), nn.Module)}
    found = {id(one) for one in instances(nn.Module)}
    assert found == expected
    assert {id(model), id(model[0]), id(model[1])} <= found


class _Keeps(torch.autograd.Function):
    """Keeps its output on `ctx`."""

    @staticmethod
    def forward(ctx, x):
        """Double."""
        ctx.result = x * 2
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        """Double."""
        return gradient * 2


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each search for them found."""
    gc.collect()
    found: list[int] = []

    def counted(*families: type) -> list[object]:
        nodes = instances(*families)
        found.append(len(nodes))
        return nodes

    monkeypatch.setattr(cycles, "instances", counted)
    return found


def test_nodes_are_searched_for_only_where_there_may_be_some(searches: list[int]) -> None:
    """All objects are looked at for the first time, and then while a function's node lives."""
    assert list(cycles.kept_on_ctx(())) == []
    count = len(searches)
    assert list(cycles.kept_on_ctx(())) == []
    assert len(searches) == count  # no node has come: no search
    output = _Keeps.apply(torch.ones(3, requires_grad=True))
    kept = list(cycles.kept_on_ctx(()))
    assert [name for name, _ in kept] == ["_Keeps"]
    assert kept[0][1].tolist() == [2, 2, 2]
    assert searches[count:] == [1]
    del output, kept
    gc.collect()
    assert list(cycles.kept_on_ctx(())) == []
    assert len(searches) == count + 1  # it has gone again
