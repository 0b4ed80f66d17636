"""Which module a pass is of: the one called, or one that holds all that its optimizer updates.

A model may be called by its parts: by a method of its own that is not ``forward``, by the script
itself, or because it is no module at all. What a plan is made for then is all that the part's
optimizer updates. Responsible for finding that, and for whether a call makes a graph. Not
responsible for when passes begin and end (:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.run.script.model_refusals import model_refusal
from memfit.tensors.barrier import without_barrier
from memfit.track.live_objects import instances

_BARE = "bare parameters"


class Together(nn.Module):
    """Modules and parameters that one optimizer updates and no module of the script's holds."""

    def __init__(self, parts: Iterable[nn.Module], alone: Iterable[Tensor]) -> None:
        """Hold them.

        Args:
            parts: The modules.
            alone: What is trained and in none of these; not all of it is an ``nn.Parameter``.
        """
        super().__init__()
        # As they are: a script's own hooks see what it registers itself.
        self._modules.update({f"part{i}": part for i, part in enumerate(parts)})
        own: dict[str, Any] = {f"alone{i}": it for i, it in enumerate(alone)}
        self._parameters.update(own)


def class_names(root: nn.Module) -> list[str]:
    """Class names of what a pass is of; of parameters in no module, that they are such.

    Args:
        root: The model.
    """
    parts = root.children() if isinstance(root, Together) else (root,)
    return list(dict.fromkeys(type(part).__name__ for part in parts)) or [_BARE]


@dataclass(slots=True, frozen=True)
class _Known:
    """What the call of a module is of, and for which optimizers that was found."""

    optimizers: tuple[int, int]
    root: weakref.ref[nn.Module]
    path: str


class Roots:
    """The roots of the script's calls."""

    def __init__(self) -> None:
        """Know of no call yet."""
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._found_for: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._not_updated: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._not_updated_by = (0, 0)
        # Nobody else holds one: it is there for as long as its optimizer.
        self._together: weakref.WeakKeyDictionary[Optimizer, Together] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """An optimizer has been made, for which other modules may belong together."""
        self._known.clear()
        self._found_for.clear()

    def of(self, called: nn.Module, optimizers: Collection[Optimizer]) -> tuple[nn.Module, str]:
        """What the call of a module is of, and the path of the module from there.

        Args:
            called: The module.
            optimizers: Those that the script has made.
        """
        now = _state_of(optimizers)
        known = self._known.get(called)
        root = known.root() if known is not None and known.optimizers == now else None
        if known is not None and root is not None:
            return root, known.path
        with without_barrier():
            root = self._found(called, optimizers, now)
            path = next((path for path, it in root.named_modules() if it is called), None)
            if path is None or (root is not called and model_refusal(root, _device(called))):
                root, path = called, ""
        self._known[called] = _Known(now, weakref.ref(root), path)
        return root, path

    def _found(
        self, called: nn.Module, optimizers: Collection[Optimizer], now: tuple[int, int]
    ) -> nn.Module:
        """The smallest module, else modules together, with all that its optimizer updates.

        Several optimizers step at different times, and each of them ends a pass.
        """
        own = {id(parameter) for parameter in called.parameters()}
        updated = {optimizer: _updated(optimizer) for optimizer in optimizers}
        updating = [it for it, parameters in updated.items() if not own.isdisjoint(parameters)]
        if len(updating) != 1 or updated[updating[0]].keys() <= own:
            return called
        (optimizer,) = updating
        # It is the same for each part, and all modules of the script are looked through for it.
        root = self._known_of(optimizer, now)
        if root is None or all(it is not called for it in root.modules()):
            root = self._root_of(optimizer, updated)
        if root is None:
            return called
        self._found_for[optimizer] = _Known(now, weakref.ref(root), "")
        return root

    def of_parameter(self, used: Tensor, optimizers: Collection[Optimizer]) -> nn.Module | None:
        """What the use of a parameter is of; ``None`` where no optimizer alone updates it.

        Args:
            used: The parameter.
            optimizers: Those that the script has made.
        """
        now = _state_of(optimizers)
        if self._not_updated_by != now:
            self._not_updated.clear()
            self._not_updated_by = now
        if self._not_updated.get(id(used)) is used:
            return None
        updated = {optimizer: _updated(optimizer) for optimizer in optimizers}
        updating = [it for it, parameters in updated.items() if id(used) in parameters]
        root = None
        if len(updating) == 1:
            (optimizer,) = updating
            with without_barrier():
                root = self._known_of(optimizer, now) or self._root_of(optimizer, updated)
        if root is None:
            self._not_updated[id(used)] = used
        else:
            self._found_for[updating[0]] = _Known(now, weakref.ref(root), "")
        return root

    def _known_of(self, optimizer: Optimizer, now: tuple[int, int]) -> nn.Module | None:
        """What was found for an optimizer, while all optimizers are the same."""
        known = self._found_for.get(optimizer)
        return known.root() if known is not None and known.optimizers == now else None

    def _root_of(
        self, optimizer: Optimizer, updated: dict[Optimizer, dict[int, Tensor]]
    ) -> nn.Module | None:
        """What holds all that an optimizer updates, and nothing that another one does."""
        wanted = updated.pop(optimizer)
        others = set().union(*updated.values())
        family = _Family(instances(nn.Module))
        holder = family.holder(wanted.keys(), others)
        if holder is not None:
            return holder
        together = self._together.get(optimizer)
        if together is None or {id(p) for p in together.parameters()} != wanted.keys():
            together = family.together(wanted)
        if together is not None:
            self._together[optimizer] = together
        return together


class _Family:
    """Modules, and which of them holds which."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Look at them.

        Args:
            modules: All that there are.
        """
        self._modules = [it for it in modules if not isinstance(it, Together)]
        self._parents: dict[int, list[nn.Module]] = defaultdict(list)
        self._direct: dict[int, list[nn.Module]] = defaultdict(list)
        for module in self._modules:
            for child in _children(module):
                self._parents[id(child)].append(module)
            for parameter in _own(module):
                self._direct[id(parameter)].append(module)

    def holder(self, wanted: Collection[int], others: set[int]) -> nn.Module | None:
        """The smallest module that holds some parameters, and none of others.

        Args:
            wanted: The ``id`` of the parameters.
            others: The ``id`` of those that it may not hold: other optimizers update them.
        """
        found = []
        for module in self._above(self._direct[next(iter(wanted))]):
            held = {id(parameter) for parameter in module.parameters()}
            if held.issuperset(wanted) and held.isdisjoint(others):
                found.append((sum(1 for _ in module.modules()), module))
        return min(found, key=lambda it: it[0])[1] if found else None

    def together(self, wanted: dict[int, Tensor]) -> Together:
        """The largest modules in which nothing else is trained, and what is in none of them.

        Args:
            wanted: What is trained, by ``id``.
        """
        whole: dict[int, tuple[bool, bool]] = {}
        fitting = [it for it in self._modules if all(_all_in(it, wanted, whole))]
        inside = {id(it) for it in fitting}
        parts = [
            it
            for it in fitting
            if not any(id(parent) in inside for parent in self._parents.get(id(it), ()))
        ]
        held = {id(parameter) for part in parts for parameter in part.parameters()}
        return Together(parts, [it for place, it in wanted.items() if place not in held])

    def _above(self, modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
        """Modules, and all that hold one of them."""
        seen: set[int] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                waiting += self._parents.get(id(module), ())
                yield module


def _all_in(
    module: nn.Module, wanted: Collection[int], known: dict[int, tuple[bool, bool]]
) -> tuple[bool, bool]:
    """Whether all that is trained in a module is among some, and whether anything is."""
    if id(module) not in known:
        known[id(module)] = (True, False)  # should it hold itself
        own = [id(it) for it in _own(module) if it.requires_grad or id(it) in wanted]
        below = [_all_in(child, wanted, known) for child in _children(module)]
        is_all = all(place in wanted for place in own) and all(every for every, _ in below)
        known[id(module)] = (is_all, bool(own) or any(some for _, some in below))
    return known[id(module)]


def _children(module: nn.Module) -> list[nn.Module]:
    """Modules that one holds itself; one that is being made has none yet."""
    return [it for it in (vars(module).get("_modules") or {}).values() if it is not None]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [it for it in (vars(module).get("_parameters") or {}).values() if it is not None]


def _updated(optimizer: Optimizer) -> dict[int, Tensor]:
    """What an optimizer updates, by ``id``."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def _state_of(optimizers: Collection[Optimizer]) -> tuple[int, int]:
    """What tells whether there are others, or they update others."""
    return (len(optimizers), sum(len(g["params"]) for o in optimizers for g in o.param_groups))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def makes_graph(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes a graph: its parameters are trained, or what it is called with.

    Args:
        root: What is called.
        args: What with.
        kwargs: The same.
    """
    if any(p.requires_grad for p in root.parameters()):
        return True
    given = tree_leaves((args, kwargs))
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given)
