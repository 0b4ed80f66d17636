"""One look at what is live: who holds each block.

Responsible for saying so to the count, with categories and owners. Not responsible for when a look
is taken (:mod:`memfit.track.looks`) nor for walking through the program's objects
(:mod:`memfit.track.reach`).

Runs in the middle of the program: it runs none of the program's code, allocates no tensors, keeps
nothing alive and raises nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memfit import _native
from memfit.track import variables
from memfit.track.owners import (
    ACTIVATION,
    CAST_CACHE,
    DATASET,
    GRADIENT,
    KV_CACHE,
    OWNERS,
    PARAMETER,
    VARIABLE,
    storage_of,
)
from memfit.track.reach import Walk
from memfit.track.variables import Running, Variable

_PRECEDENCE = (GRADIENT, PARAMETER, KV_CACHE, DATASET, CAST_CACHE, ACTIVATION, VARIABLE)
"""Of several things that a block is, what it is called: the first of these."""

_YOUNG = 0
"""The generation of the collector in which results are that no variable has yet."""


AUTOCAST = "copies of parameters that autocast keeps to the end of its block"
"""Who holds what autocast has cast."""


@dataclass(slots=True, frozen=True)
class Owner:
    """Who holds blocks.

    Attributes:
        name: For a person.
        variable: The variable, where it is one.
        is_graph: Whether an autograd graph holds them that the variable holds.
    """

    name: str
    variable: Variable | None = None
    is_graph: bool = False


class Names:
    """Owners by the numbers that the count knows them by."""

    def __init__(self) -> None:
        """Know none; 0 is nobody."""
        self._owners: list[Owner] = [Owner("")]
        self._numbers: dict[tuple[str, str, str, bool], int] = {}

    def number(self, variable: Variable, *, is_graph: bool) -> int:
        """The number of a variable's, whose line may have changed since."""
        key = (variable.file, variable.scope, variable.name, is_graph)
        text = f"the autograd graph of {variable.text}" if is_graph else variable.text
        owner = Owner(text, variable, is_graph)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._owners)
            self._owners.append(owner)
        elif variable.line:  # a line says more than none, as at the end of a script
            self._owners[number] = owner
        return number

    def named(self, name: str) -> int:
        """The number of an owner that is no variable."""
        key = (name, "", "", False)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._owners)
            self._owners.append(Owner(name))
        return number

    def owner(self, number: int) -> Owner:
        """The owner of a number."""
        return self._owners[number]


NAMES = Names()
"""The owners that looks have found; there are as many as variables in the source."""


@dataclass(slots=True)
class Look:
    """What a look has found.

    Attributes:
        walk: The walk through the program's objects.
        here: The line that the program is at.
        owners: Owner of each block that was found, by address.
        categories: Category of each of them.
        sizes: Bytes of each of them.
        direct: Addresses of those that are not held by graphs alone.
        static: Addresses of what models and optimizers have.
    """

    walk: Walk
    here: Variable
    owners: dict[int, int] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    direct: set[int] = field(default_factory=set)
    static: set[int] = field(default_factory=set)


Key = tuple[str, str, str]
"""A variable: file, function and name up to the first dot."""


def key_of(variable: Variable) -> Key:
    """What tells a variable from others, whatever line it was seen at."""
    return variable.file, variable.scope, variable.name.partition(".")[0]


def look(more: Sequence[Running] = ()) -> Look:
    """Look at what is live and name it to the count.

    Args:
        more: Frames whose variables count as the program's, although they run no more.
    """
    found = search(more)
    groups: dict[tuple[str, int], list[int]] = {}
    for address, category in found.categories.items():
        owner = found.owners[address]
        if category in (PARAMETER, GRADIENT):
            owner = 0
        elif category == CAST_CACHE:
            owner = NAMES.named(AUTOCAST)
        groups.setdefault((category, owner), []).append(address)
    for (category, owner), addresses in groups.items():
        _native.label_blocks(addresses, category, owner)
    found.static = OWNERS.label()
    _name_casts(found)
    return found


def search(more: Sequence[Running] = (), without: Collection[Key] = ()) -> Look:
    """Look at what is live and name nothing.

    Args:
        more: As in :func:`look`.
        without: Variables that are passed over.
    """
    running = variables.frames(more)
    found = Look(Walk(), variables.here())
    for variable, value in variables.of_modules(running):
        if key_of(variable) not in without:
            found.walk.from_variable(variable, value)
    for variable, value in variables.of_frames(running):
        if key_of(variable) not in without:
            found.walk.from_variable(variable, value)
    for tensor in gc.get_objects(generation=_YOUNG) if not without else ():
        # Results that wait to be stored are on no list but the collector's.
        if issubclass(type(tensor), Tensor) and not found.walk.has_seen(tensor):
            found.walk.from_variable(found.here, tensor)
    _assign(found)
    return found


def _assign(found: Look) -> None:
    """Give each block that was reached a category and an owner."""
    numbers: dict[tuple[int, bool], int] = {}
    for one in found.walk.reached:
        storage = storage_of(one.tensor)
        if storage is None or storage.device.type != "cpu":
            continue
        address = storage.data_ptr()
        known = found.categories.get(address)
        found.sizes[address] = storage.nbytes()
        if not one.through_graph:
            found.direct.add(address)
        if known is None or _PRECEDENCE.index(one.category) < _PRECEDENCE.index(known):
            found.categories[address] = one.category
            key = (id(one.variable), one.through_graph)
            if key not in numbers:
                numbers[key] = NAMES.number(one.variable, is_graph=one.through_graph)
            found.owners[address] = numbers[key]


def _name_casts(found: Look) -> None:
    """Name what autocast keeps where no graph does.

    Torch shows its cache to nobody. What is live, reached by nobody, and as large as a parameter is
    in autocast's precision, is taken for the copy of one, as long as there are enough parameters.
    """
    if not torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled():
        return
    width = torch.get_autocast_dtype("cpu").itemsize
    known = found.categories.keys() | found.static
    sizes: dict[int, int] = {}
    for category, tensor in OWNERS.tensors():
        if category == PARAMETER and tensor.dtype is torch.float32 and tensor.requires_grad:
            size = tensor.numel() * width
            sizes[size] = sizes.get(size, 0) + 1
    owner = NAMES.named(AUTOCAST)
    casts = []
    for address, size, _ in _native.survivors(0, 2**63):
        if address not in known and sizes.get(size, 0) > 0:
            sizes[size] -= 1
            casts.append(address)
            found.categories[address], found.owners[address] = CAST_CACHE, owner
            found.sizes[address] = size
    _native.label_blocks(casts, CAST_CACHE, owner)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A stretch in which the collector does not run: what it finds is the program's to find."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
