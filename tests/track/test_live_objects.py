"""Objects of torch's classes found among the young alone, against a search through all."""

import gc
import os
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from memfit import _native
from memfit.track.live_objects import LiveObjects

FAMILIES = (Tensor, nn.Module, torch.optim.Optimizer, torch._C._FunctionBase)


@pytest.fixture
def objects() -> Iterator[LiveObjects]:
    """What follows them, and leaves torch and the collector as they were."""
    swap, callbacks = torch.utils.swap_tensors, list(gc.callbacks)
    live = LiveObjects()
    live.follow()
    yield live
    live.leave()
    assert torch.utils.swap_tensors is swap
    assert gc.callbacks == callbacks


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _made(kind: int) -> object:
    weight = torch.ones(2, requires_grad=True)
    if kind == 0:
        return weight
    if kind == 1:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    if kind == 2:
        return torch.optim.SGD([weight], lr=0.1)
    if kind == 3:
        return _Doubled.apply(weight)
    circle = nn.Module()
    circle.circle = [circle, weight]  # only the collector frees it
    return circle


def _among_all(families: tuple[type, ...]) -> set[int]:
    return {id(one) for one in _native.instances(gc.get_objects(), families)}


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_what_a_search_through_all_finds(seed: int, objects: LiveObjects) -> None:
    """However objects come, go and grow old, by collections of any generation."""
    rng = random.Random(seed)
    kept: list[object] = []
    for _ in range(120):
        what = rng.random()
        if what < 0.5:
            kept.append(_made(rng.randrange(5)))
        elif what < 0.7 and kept:
            kept.pop(rng.randrange(len(kept)))
        elif what < 0.85:
            gc.collect(rng.randrange(3))
        else:
            families = tuple(rng.sample(FAMILIES, rng.randint(1, 4)))
            found = [id(one) for one in objects.instances(families)]
            assert len(found) == len(set(found))
            assert set(found) == _among_all(families)
    assert {id(it) for it in objects.instances(FAMILIES)} == _among_all(FAMILIES)


def test_only_young_objects_are_looked_at(
    objects: LiveObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first search: that is what it is for."""
    old = [[] for _ in range(50_000)]
    gc.collect()
    objects.instances(FAMILIES)
    sizes = []
    instances = _native.instances
    monkeypatch.setattr(
        _native, "instances", lambda among, of: (sizes.append(len(among)), instances(among, of))[1]
    )
    weight = torch.ones(2)
    gc.collect()
    assert any(it is weight for it in objects.instances((Tensor,)))
    assert sum(sizes) < len(old) / 4


def test_tensors_can_still_be_swapped(objects: LiveObjects) -> None:
    """Torch swaps none that is referred to weakly; the script's own references count as ever."""
    first, second = torch.ones(2), torch.zeros(3)
    gc.collect()
    objects.instances((Tensor,))
    for _ in range(2):
        torch.utils.swap_tensors(first, second)
        gc.collect()
        found = {id(it) for it in objects.instances((Tensor,))}
        assert {id(first), id(second)} <= found == _among_all((Tensor,))
    assert (first.tolist(), second.tolist()) == ([1, 1], [0, 0, 0])
    reference = weakref.ref(first)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(first, second)
    assert reference() is first


def test_a_script_may_empty_the_collectors_list(objects: LiveObjects) -> None:
    """What grew old unseen is found all the same."""
    callbacks = list(gc.callbacks)
    objects.instances((Tensor,))
    gc.callbacks.clear()
    weight = torch.ones(2)
    gc.collect()
    assert any(it is weight for it in objects.instances((Tensor,)))
    gc.callbacks[:] = callbacks


def test_nothing_is_noted_for_long_that_nobody_asks_for(objects: LiveObjects) -> None:
    """A script runs for days after its last look; the next one finds everything."""
    callbacks = list(gc.callbacks)
    objects.instances((Tensor,))
    assert len(gc.callbacks) == len(callbacks) + 1
    for _ in range(200):
        gc.collect(1)
    assert gc.callbacks == callbacks
    weight = torch.ones(2)
    gc.collect()
    assert any(it is weight for it in objects.instances((Tensor,)))


def test_children_search_all(objects: LiveObjects) -> None:
    """A process that the script forks notes nothing, and swaps tensors as torch does."""
    weight, other = torch.ones(2), torch.zeros(2)
    gc.collect()
    objects.instances((Tensor,))
    child = os.fork()
    if child == 0:
        try:
            gc.collect()
            found = {id(it) for it in objects.instances((Tensor,))}
            torch.utils.swap_tensors(weight, other)
            os._exit(0 if {id(weight), id(other)} <= found and weight.tolist() == [0, 0] else 1)
        except BaseException:  # noqa: BLE001 - of a child
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
