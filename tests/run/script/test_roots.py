"""Which module the call of one is of, by what its optimizer updates."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from memfit.run.script.roots import Roots, Together, class_names
from memfit.track.live_objects import instances


class Pair(nn.Module):
    """Two parts that are called by themselves, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(1))


class Around(nn.Module):
    """A module with another in it, and more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(2, 2)


def adam(*parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam([*parameters])


def test_a_part_is_of_the_smallest_module_with_all_that_is_updated():
    pair = Pair()
    around = Around(pair)
    optimizers = [adam(*pair.parameters())]
    roots = Roots()
    assert roots.of(pair.first, optimizers) == (pair, "first")
    assert roots.of(pair.second[0], optimizers) == (pair, "second.0")
    assert roots.of(pair, optimizers) == (pair, "")
    assert roots.of(around, optimizers) == (around, ""), "it holds all"
    assert roots.of(around.more, optimizers) == (around.more, ""), "nothing updates it"


def test_the_modules_of_a_script_are_looked_through_once_for_all_parts(monkeypatch):
    pair, looks = Pair(), []
    monkeypatch.setattr(
        "memfit.run.script.roots.instances", lambda *kinds: looks.append(1) or instances(*kinds)
    )
    optimizers, roots = [adam(*pair.parameters())], Roots()
    for part in (pair.first, pair.second, pair.second[0]):
        assert roots.of(part, optimizers)[0] is pair
    assert len(looks) == 1
    outer = Around(pair)
    optimizers[0].add_param_group({"params": [*outer.more.parameters()]})
    assert roots.of(pair.second, optimizers)[0] is outer, "it updates more now"


def test_a_part_that_is_updated_alone_is_a_root():
    pair = Pair()
    assert Roots().of(pair.first, [adam(*pair.first.parameters())]) == (pair.first, "")


def test_what_two_optimizers_update_is_a_root_of_its_own():
    pair = Pair()
    optimizers = [adam(*pair.parameters()), adam(*pair.first.parameters())]
    assert Roots().of(pair.first, optimizers) == (pair.first, "")


def test_parts_that_no_module_holds_belong_together():
    first, second, scale = (
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Parameter(torch.ones(1)),
    )
    optimizer = adam(*first.parameters(), *second.parameters(), scale)
    roots = Roots()
    root, path = roots.of(first, [optimizer])
    assert isinstance(root, Together)
    assert root.get_submodule(path) is first
    assert {id(p) for p in root.parameters()} == {
        id(p) for p in (*first.parameters(), *second.parameters(), scale)
    }
    assert roots.of(second, [optimizer])[0] is root
    assert sorted(class_names(root)) == ["Linear", "Sequential"]
    gone = weakref.ref(root)
    del root, optimizer
    gc.collect()
    assert gone() is None, "it goes with the optimizer"


def test_a_module_that_another_optimizer_updates_too_is_not_the_root():
    system = Around(Pair())
    pair = system.inner
    of_pair = adam(*pair.first.parameters(), *pair.second.parameters())
    optimizers = [of_pair, adam(pair.scale, *system.more.parameters())]
    root, _ = Roots().of(pair.first, optimizers)
    assert isinstance(root, Together)
    assert set(root.children()) == {pair.first, pair.second}


def test_a_tensor_that_is_no_parameter_belongs_to_what_is_trained_with_it():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    free = torch.zeros(1, requires_grad=True)
    optimizers = [adam(*first.parameters(), *second.parameters(), free)]
    roots = Roots()
    root, path = roots.of(first, optimizers)
    assert isinstance(root, Together)
    assert root.get_submodule(path) is first
    assert {id(it) for it in root.parameters()} >= {id(free), id(second.weight)}
    assert roots.of_parameter(free, optimizers) is root


def test_what_no_optimizer_alone_updates_is_of_nothing():
    free, shared = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizers = [adam(shared), adam(shared)]
    roots = Roots()
    assert roots.of_parameter(free, optimizers) is None
    assert roots.of_parameter(shared, optimizers) is None
    optimizers.append(adam(free))
    root = roots.of_parameter(free, optimizers)
    assert isinstance(root, Together)
    assert next(root.parameters()) is free


def test_a_whole_that_cannot_be_planned_leaves_each_part_a_root():
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = torch.jit.script(nn.Linear(2, 2))

    model = Scripted()
    assert Roots().of(model.first, [adam(*model.parameters())]) == (model.first, "")


def test_parameters_that_an_optimizer_gets_later_change_the_root():
    pair = Pair()
    optimizer = adam(*pair.first.parameters())
    roots = Roots()
    assert roots.of(pair.first, [optimizer]) == (pair.first, "")
    optimizer.add_param_group({"params": [*pair.second.parameters(), pair.scale]})
    assert roots.of(pair.first, [optimizer]) == (pair, "first")


def test_a_new_optimizer_changes_the_root():
    pair = Pair()
    roots = Roots()
    former = adam(*pair.first.parameters())
    assert roots.of(pair.first, [former]) == (pair.first, "")
    roots.forget()
    assert roots.of(pair.first, [adam(*pair.parameters())]) == (pair, "first")
