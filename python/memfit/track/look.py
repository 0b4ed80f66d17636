"""One look at what is live: who holds each block.

Responsible for saying so to the count, with categories and owners. Not responsible for when a look
is taken (:mod:`memfit.track.looks`) nor for walking through the program's objects
(:mod:`memfit.track.reach`).

Runs in the middle of the program: it runs none of the program's code, allocates no tensors, keeps
nothing alive and raises nothing.
"""

from __future__ import annotations

import gc
import struct
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor

from memfit import _native
from memfit.tensors.stand_ins import StandIn
from memfit.track import variables
from memfit.track.backwards import BACKWARDS
from memfit.track.cycles import held_by_hooks, kept_on_ctx, on_ctx, own_hook
from memfit.track.idle_graphs import IdleGraphs
from memfit.track.memory import bytes_at
from memfit.track.owners import (
    ACTIVATION,
    CAST_CACHE,
    DATASET,
    GRADIENT,
    KV_CACHE,
    OPTIMIZER_STATE,
    OWNERS,
    PARAMETER,
    TEMPORARY,
    VARIABLE,
    storage_of,
)
from memfit.track.reach import Walk
from memfit.track.variables import Running, Variable

_PACKAGE = str(Path(__file__).parents[1])
_PRECEDENCE = (
    *(GRADIENT, PARAMETER, KV_CACHE, DATASET, CAST_CACHE),
    *(ACTIVATION, OPTIMIZER_STATE, VARIABLE, TEMPORARY),
)
"""Of several things that a block is, what it is called: the first of these."""

_YOUNG = 0
"""The generation of the collector in which results are that no variable has yet."""


OF_UPDATE = "scratch memory of an optimizer's step"
"""Who holds what an optimizer has made to update parameters."""

OF_BACKWARD = "gradients of activations and scratch memory of a backward"
"""Likewise, of what a backward has made or read again."""

_IDLE = ", which no backward has run through: where none will, use `torch.no_grad()`"

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

    @property
    def key(self) -> tuple[str, ...]:
        """What it is, wherever its function was when it was looked at."""
        of = self.variable
        return (self.name,) if of is None else (of.file, of.scope, of.name)


class Names:
    """Owners by the numbers that the count knows them by."""

    def __init__(self) -> None:
        """Know none; 0 is nobody."""
        self._owners: list[Owner] = [Owner("")]
        self._numbers: dict[tuple[str, str, str, bool], int] = {}

    def number(self, variable: Variable, *, is_graph: bool, is_idle: bool = False) -> int:
        """The number of a variable's, whose line may have changed since."""
        idle = _IDLE if is_idle else ""
        key = (variable.file, variable.scope, variable.name + idle, is_graph)
        text = f"the autograd graph of {variable.text}{idle}" if is_graph else variable.text
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
        temporary: What is said of what torch holds in a function of its own.
    """

    walk: Walk
    here: Variable
    owners: dict[int, int] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    direct: set[int] = field(default_factory=set)
    static: set[int] = field(default_factory=set)
    temporary: str = ""

    def in_graphs(self) -> dict[int, tuple[int, int]]:
        """Owner and bytes of each block that graphs alone hold, by address."""
        return {
            address: (self.owners[address], self.sizes[address])
            for address, category in self.categories.items()
            if category == ACTIVATION and address not in self.direct
        }


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
        elif category == TEMPORARY:
            owner = NAMES.named(found.temporary)
        groups.setdefault((category, owner), []).append(address)
    for (category, owner), addresses in groups.items():
        _native.label_blocks(addresses, category, owner)
    found.static = OWNERS.label()
    _name_casts(found)
    _name_cycles(found)
    return found


def search(more: Sequence[Running] = (), *, with_results: bool = True) -> Look:
    """Look at what is live and name nothing.

    Args:
        more: As in :func:`look`.
        with_results: Whether tensors that no variable leads to yet count as those of this line.
    """
    young = _young() if with_results else []
    running = variables.frames(more)
    update, backward = variables.updating(), variables.in_backward()
    within = update or backward
    of_torch = variables.inside(within) if within is not None else ()
    frames_of_torch = [one for one in running if id(one[0]) in of_torch]
    running = [one for one in running if id(one[0]) not in of_torch]
    found = Look(Walk(), variables.here(), temporary=OF_BACKWARD if update is None else OF_UPDATE)
    every = (*running, *frames_of_torch)
    found.walk.pass_by(frame for frame, _ in every)
    of_optimizers = [one for one in every if variables.is_of_optimizer(one[0])]
    others = [one for one in running if not variables.is_of_optimizer(one[0])]
    functions = []
    for variable, value in (*variables.of_modules(running), *variables.of_frames(others, running)):
        if isinstance(value, FunctionType):
            functions.append((variable, value))
        else:
            found.walk.from_variable(variable, value)
    for variable, value in variables.of_context():
        found.walk.from_variable(variable, value)
    for variable, value in functions:  # what they close over has names of its own
        found.walk.from_variable(variable, value)
    for variable, tensors in variables.of_optimizers(of_optimizers, running):
        found.walk.from_variable(variable, tensors, OPTIMIZER_STATE)
    for variable, value in () if of_torch else variables.of_frames(of_optimizers, running):
        found.walk.from_variable(variable, value)
    for variable, value in variables.of_frames(frames_of_torch, running):
        found.walk.from_variable(variable, value, TEMPORARY)
    for tensor in young:
        if not found.walk.has_seen(tensor):
            found.walk.from_variable(found.here, tensor, TEMPORARY if of_torch else VARIABLE)
    _assign(found)
    return found


def _young() -> list[Tensor]:
    """Results that wait to be stored: they are on no list but the collector's."""
    objects = gc.get_objects(generation=_YOUNG)
    nodes = [thing for thing in objects if issubclass(type(thing), torch._C._FunctionBase)]
    of_nodes = {id(value) for value in gc.get_referents(*gc.get_referents(*nodes))}
    of_nodes.update(id(tensor) for node in nodes for tensor in on_ctx(node))
    known: set[int] = set()
    stand_ins = [thing for thing in objects if issubclass(type(thing), StandIn)]
    of_nodes.update(id(tensor) for one in stand_ins for tensor in one.held(known))
    return [
        thing
        for thing in objects
        if issubclass(type(thing), Tensor)
        and not issubclass(type(thing), torch.nn.Parameter)
        and id(thing) not in of_nodes
        and own_hook(thing) is None
    ]


def _assign(found: Look) -> None:
    """Give each block that was reached a category and an owner."""
    numbers: dict[tuple[int, bool, bool], int] = {}
    # One that kept its graph may have run through any.
    roots = () if BACKWARDS.keeping else BACKWARDS.roots
    idle, nodes = IdleGraphs(roots, BACKWARDS.begin), found.walk.graphs.nodes
    # What a graph alone holds goes with it, so whatever else holds a block comes first.
    for one in sorted(found.walk.reached, key=lambda one: one.through_graph):
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
            is_held = address in found.direct
            is_idle = one.through_graph and not is_held and idle.has(nodes.get(one.graph))
            key = (id(one.variable), one.through_graph, is_idle)
            if key not in numbers:
                of_graph = {"is_graph": one.through_graph, "is_idle": is_idle}
                numbers[key] = NAMES.number(one.variable, **of_graph)
            found.owners[address] = numbers[key]


def _name_casts(found: Look) -> None:
    """Name what autocast keeps where no graph does.

    Torch shows its cache to nobody. What is live, reached by nobody, and begins with the numbers of
    a parameter in autocast's precision is the copy of that one.
    """
    if not torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled():
        return
    width = torch.get_autocast_dtype("cpu").itemsize
    known = found.categories.keys() | found.static
    begins: dict[int, set[bytes | None]] = {}
    for category, tensor in OWNERS.tensors():
        if category == PARAMETER and tensor.dtype is torch.float32 and tensor.requires_grad:
            begins.setdefault(tensor.numel() * width, set()).add(_cast_begin(tensor))
    owner = NAMES.named(AUTOCAST)
    casts = []
    for address, size, _ in _native.survivors(0, 2**63, with_models=False):
        if address not in known and _is_cast(address, begins.get(size, ())):
            casts.append(address)
            found.categories[address], found.owners[address] = CAST_CACHE, owner
            found.sizes[address] = size
    _native.label_blocks(casts, CAST_CACHE, owner)


def _name_cycles(found: Look) -> None:
    """Name what functions of the program keep on a ``ctx`` that no variable leads to any more."""
    known = found.categories.keys() | found.static
    live = _native.survivors(0, 2**63, with_models=False)
    lost = {address: size for address, size, _ in live if address not in known}
    if sum(lost.values()) <= _NAMED * _native.counted_bytes():
        return  # to look at all objects takes a while
    kept = ((f"`ctx` of `{it}`", of) for it, of in kept_on_ctx(found.walk.graphs.nodes.keys()))
    _name_lost(found, lost, kept)
    if sum(lost.values()) > _MUCH * _native.counted_bytes():
        _name_lost(found, lost, ((f"their own hook {it}", of) for it, of in held_by_hooks()))


def _name_lost(found: Look, lost: dict[int, int], kept: Iterable[tuple[str, Tensor]]) -> None:
    """Name blocks that are kept by what no variable leads to; they are lost no more."""
    groups: dict[str, list[int]] = {}
    for name, tensor in kept:
        storage = storage_of(tensor)
        address = 0 if storage is None else storage.data_ptr()
        size = lost.pop(address, None)
        if size is not None:
            groups.setdefault(name, []).append(address)
            found.sizes[address] = size
    for name, addresses in groups.items():
        owner = NAMES.named(name)
        for address in addresses:
            found.categories[address], found.owners[address] = ACTIVATION, owner
        _native.label_blocks(addresses, ACTIVATION, owner)


_NAMED = 0.02
"""Part of what is live that need not be known to anybody: for less, nothing more is looked at."""

_MUCH = 0.1
"""Likewise, where torch's own programs have nothing that can be found."""

_COMPARED = 64
"""Elements by which a copy of a parameter is known."""


def _is_cast(address: int, begins: Collection[bytes | None]) -> bool:
    """Whether a block begins as the copy of a parameter of its size does."""
    known = next((begin for begin in begins if begin is not None), None)
    return known is not None and bytes_at(address, len(known)) in begins


def _cast_begin(parameter: Tensor) -> bytes | None:
    """How a parameter's copy in autocast's precision begins; ``None`` where that says nothing.

    Computed without an op of torch, which the program's modes would see.
    """
    count = min(parameter.numel(), _COMPARED)
    begin = bytes_at(parameter.data_ptr(), 4 * count) if parameter.is_contiguous() else None
    if begin is None or not any(begin):
        return None
    if torch.get_autocast_dtype("cpu") is torch.float16:
        try:
            return struct.pack(f"{count}e", *struct.unpack(f"{count}f", begin))
        except OverflowError:  # there they become infinite
            return None
    # To the nearest, of two the even one.
    words = struct.unpack(f"{count}I", begin)
    return struct.pack(f"{count}H", *((w + 0x7FFF + (w >> 16 & 1)) >> 16 & 0xFFFF for w in words))


def is_own(error: Exception) -> bool:
    """Whether an error comes from memfit's own code, and not from a handler of the program's."""
    trace = traceback.walk_tb(error.__traceback__)
    files = [frame.f_code.co_filename for frame, _ in trace]
    return not files or files[-1].startswith(_PACKAGE) or "/torch/" in files[-1]
