"""Which tensors are reached from which variables of the program.

Responsible for walking through Python's objects, from each variable on, through lists,
dictionaries, objects, closures, hooks and bound methods, and through autograd's graphs. Runs no
code of the program's. Not responsible for the variables (:mod:`memfit.track.variables`) nor for
what is made of the answer (:mod:`memfit.track.look`).
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import (
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from memfit.libraries import is_library, module_name
from memfit.tensors.stand_ins import StandIn
from memfit.tensors.storage import gradient_of, graph_of, is_leaf, plain_tensors
from memfit.track import owners
from memfit.track.graphs import Graphs
from memfit.track.owners import (
    ACTIVATION,
    CAST_CACHE,
    DATASET,
    GRADIENT,
    KV_CACHE,
    OPTIMIZER_STATE,
    OWNERS,
    PARAMETER,
    VARIABLE,
)
from memfit.track.variables import MODULES, Variable, is_memfit, space_of

_OBJECTS = 400_000
"""Objects that one walk visits at most."""

_LARGE = 20_000
"""Elements from which on a container is tried before all of it is walked through."""

_TRIED = 64
_DEPTH = 2
_KV_CLASS = re.compile(
    r"KV_?Cache|(Dynamic|Static|Hybrid|SlidingWindow|Offloaded|EncoderDecoder)Cache"
)
_KV_NAME = re.compile(
    r"(^|[._])((layer_)?past(_key_values?)?|kvs?(_?cache)?|(k|v|key|value)_?cache|keys_values)s?$"
)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_NO_WAYS = (
    *(str, bytes, int, float, complex, type(None), range, torch.dtype, torch.device),
    *(ModuleType, CodeType),
)
"""Classes of objects that lead nowhere, or everywhere."""

_FAMILIES = {
    Tensor: "tensor",
    Module: "module",
    Optimizer: "optimizer",
    type: "class",
    torch.autograd.graph.Node: "node",
    FrameType: "frame",
    TracebackType: "traceback",
}


class Reached(NamedTuple):  # of which there are thousands: one made so takes a third of the time
    """A tensor and how it was reached.

    Attributes:
        tensor: The tensor.
        category: What it is, as far as the way to it tells.
        variable: The variable at which the way begins.
        through_graph: Whether the way leads through an autograd graph.
        graph: The number of that graph's first node; 0 without one.
    """

    tensor: Tensor
    category: str
    variable: Variable
    through_graph: bool
    graph: int = 0


@dataclass(slots=True)
class Walk:
    """One walk; what was visited from one variable is not visited from another.

    Attributes:
        reached: What was found, in order.
        graphs: The graphs on the way.
        is_complete: Whether all was visited that can be reached.
        in_tracebacks: What was found in functions that an exception has ended and holds.
        arrays: Arrays of numpy with memory of their own: who holds each, and its bytes.
    """

    reached: list[Reached] = field(default_factory=list)
    in_tracebacks: list[Reached] = field(default_factory=list)
    arrays: list[tuple[Variable, int]] = field(default_factory=list)
    graphs: Graphs = field(default_factory=Graphs)
    is_complete: bool = True
    _seen: set[int] = field(default_factory=set)
    _kept: list[Any] = field(default_factory=list)
    _kinds: dict[type, str] = field(default_factory=dict)
    _stood_for: set[int] = field(default_factory=set)
    _visited: int = 0

    def __post_init__(self) -> None:
        """Know what leads to everything, and is no way."""
        self._seen.update(MODULES.spaces())
        self._seen.update((id(self._seen), id(self.reached), id(self._kept), id(self.graphs.nodes)))

    def pass_by(self, things: Iterable[object]) -> None:
        """Visit some objects no more.

        Args:
            things: They; they live as long as the walk.
        """
        self._seen.update(map(id, things))

    def has_seen(self, thing: object) -> bool:
        """Whether an object was visited."""
        return id(thing) in self._seen

    def from_variable(self, variable: Variable, value: Any, category: str = VARIABLE) -> None:
        """Walk on from a variable.

        Args:
            variable: The variable.
            value: Its value.
            category: What its tensors are, where nothing says more.
        """
        category = KV_CACHE if _KV_NAME.search(variable.name) else category
        self._from(variable, value, category, 0)

    def _from(self, variable: Variable, value: Any, category: str, depth: int) -> None:
        kind = self._kind(type(value))
        if kind == "skip" or id(value) in self._seen:
            return
        if kind == "object" and depth < _DEPTH:
            self._attributes(variable, value, category, depth)
        elif isinstance(value, FunctionType) and depth < _DEPTH:
            for name, inner in closed_over(value):
                self._from(variable.of(name), inner, category, _DEPTH)
            self._spread(variable, [value], category)
        else:
            self._spread(variable, [value], category)

    def _attributes(self, variable: Variable, value: Any, category: str, depth: int) -> None:
        """Walk on from each attribute of an object, under its own name."""
        self._seen.add(id(value))
        space = _space(value)
        for name, attribute in list(space.items()) if space is not None else ():
            if isinstance(name, str):
                kind = KV_CACHE if _KV_NAME.search(name) else category
                self._from(variable.of(name), attribute, kind, depth + 1)
        for name, attribute in slots_of(value):
            kind = KV_CACHE if _KV_NAME.search(name) else category
            self._from(variable.of(name), attribute, kind, depth + 1)
        if space is not None:
            self._seen.add(id(space))
        self._spread(variable, gc.get_referents(value), category)

    def _module(self, variable: Variable, module: Module, category: str) -> None:
        OWNERS.add(module)
        space = _space(module) or {}
        for kept in ("_parameters", "_buffers"):
            self._seen.add(id(space.get(kept)))
            for name, own in list((space.get(kept) or {}).items()):
                self._graphs_of(variable.of(name), own)
        children = space.get("_modules")
        if isinstance(children, dict):
            self._seen.add(id(children))
            for name, child in list(children.items()):
                self._from(variable.of(name), child, category, _DEPTH)
        for name, attribute in list(space.items()):
            if id(attribute) in self._seen or not isinstance(name, str):
                continue
            # Most are settings, and dictionaries of hooks that are empty.
            if self._kind(type(attribute)) != "skip" and not _is_empty(attribute):
                is_kv = _KV_NAME.search(name) or (name == "cache" and _is_attention(module))
                kind = KV_CACHE if is_kv else category
                self._spread(variable.of(name), [attribute], kind)

    def _spread(self, variable: Variable, start: list[Any], category: str) -> None:
        """Walk on, level by level."""
        level = self._fresh(variable, start, category)
        while level:
            if self._visited > _OBJECTS:
                self.is_complete = False
                return
            large = [thing for thing in level if _is_large(thing)]
            if large:
                level = [thing for thing in level if not _is_large(thing)]
                level += [thing for thing in large if self._leads_to_tensors(thing)]
            self._kept.append(level)  # numbers tell objects apart only while they live
            level = self._fresh(variable, gc.get_referents(*level), category)

    def _fresh(self, variable: Variable, things: Iterable[Any], category: str) -> list[Any]:
        """Those that were not visited and lead further; tensors are taken down on the way."""
        found, apart = [], []
        for thing in things:
            if id(thing) in self._seen:
                if category in (DATASET, KV_CACHE) and self._kind(type(thing)) == "tensor":
                    self._take_down(variable, thing, category)  # what it is goes before its name
                continue
            kind = self._kind(type(thing))
            if kind == "container" and not gc.is_tracked(thing):
                if not _holds_array(thing):
                    continue
            elif kind == "skip":
                continue
            self._seen.add(id(thing))
            if kind == "tensor":
                self._tensor(variable, thing, category)
                found.append(thing)  # its hooks and attributes
            elif kind in ("container", "object"):
                found.append(thing)
            else:
                apart.append((kind, thing))
        self._visited += len(found)
        for kind, thing in apart:
            self._apart(variable, kind, thing, category)
        return found

    def _apart(self, variable: Variable, kind: str, thing: Any, category: str) -> None:
        """What is no mere step on the way."""
        if kind == "module":
            self._module(variable, thing, category)
        elif kind == "optimizer":
            OWNERS.add(thing)
            groups = (_space(thing) or {}).get("param_groups", ())
            self._spread(variable, [group["params"] for group in groups], PARAMETER)
            self._spread(variable, gc.get_referents(thing), OPTIMIZER_STATE)
        elif kind == "class":
            self._class(variable, thing, category)
        elif kind == "node":
            self._graph(variable, thing)
        elif kind == "array":
            self._array(variable, thing, category)
        elif kind == "frame":
            self._frame(variable, thing, category)
        elif kind == "traceback":
            self._traceback(variable, thing, category)
        else:
            self._spread(variable, gc.get_referents(thing), kind)

    def _array(self, variable: Variable, array: Any, category: str) -> None:
        """An array of numpy, which the collector does not see: a view, of a tensor or its own."""
        kind = _array_class()
        base = kind.base.__get__(array)
        if base is None:
            self.arrays.append((variable, kind.nbytes.__get__(array)))
        self._spread(variable, [base], category)
        if kind.dtype.__get__(array).hasobject and kind.size.__get__(array) <= _LARGE:
            self._spread(variable, list(kind.flat.__get__(array)), category)
        elif kind.dtype.__get__(array).hasobject:
            self.is_complete = False

    def array_bytes(self) -> dict[str, int]:
        """Bytes of the arrays of numpy that are no tensors', by the variable that holds them."""
        found: dict[str, int] = {}
        for variable, size in self.arrays:
            found[variable.text] = found.get(variable.text, 0) + size
        return found

    def _class(self, variable: Variable, kind: type, category: str) -> None:
        if not is_library(_file_of(kind)):
            for name, attribute in list(vars(kind).items()):
                if not isinstance(attribute, FunctionType):
                    self._from(variable.of(name), attribute, category, _DEPTH)
            self._spread(variable, list(vars(kind).values()), category)

    def _traceback(self, variable: Variable, first: TracebackType, category: str) -> None:
        """The functions that an exception has ended; of a deep recursion there are many."""
        before = len(self.reached)
        trace: TracebackType | None = first
        while trace is not None:
            self._seen.add(id(trace))
            if id(trace.tb_frame) not in self._seen:
                self._seen.add(id(trace.tb_frame))
                self._frame(variable, trace.tb_frame, category)
            trace = trace.tb_next
        self.in_tracebacks += self.reached[before:]

    def _frame(self, variable: Variable, frame: FrameType, category: str) -> None:
        """A function that does not run now; not those that have called it."""
        if not is_memfit(frame):
            values = [it for it in gc.get_referents(frame) if type(it) is not FrameType]
            self._spread(variable, values, category)

    def _tensor(self, variable: Variable, tensor: Tensor, category: str) -> None:
        with torch._C.DisableTorchFunction():
            node = graph_of(tensor)
            gradient = gradient_of(tensor) if tensor.requires_grad and is_leaf(tensor) else None
        own = PARAMETER if issubclass(type(tensor), torch.nn.Parameter) else category
        self._take_down(variable, tensor, own)
        if gradient is not None and id(gradient) not in self._seen:
            self._seen.add(id(gradient))
            self._tensor(variable, gradient, GRADIENT)
        if node is not None:
            self._graph(variable, node)

    def _graphs_of(self, variable: Variable, own: Tensor | None) -> None:
        """Walk through the graph of a module's tensor, and that of its gradient."""
        if own is None or not own.requires_grad:
            return
        with torch._C.DisableTorchFunction():
            gradient = gradient_of(own) if is_leaf(own) else None
            nodes = [graph_of(it) for it in (own, gradient) if it is not None]
        for node in nodes:
            if node is not None:
                self._graph(variable, node)

    def _take_down(self, variable: Variable, tensor: Tensor, category: str) -> None:
        for part in plain_tensors(tensor):
            self.reached.append(Reached(part, category, variable, through_graph=False))

    def _graph(self, variable: Variable, node: Any) -> None:
        for value, is_cast in self.graphs.of(node):
            if isinstance(value, Tensor):
                self._seen.add(id(value))  # one more name for it, made by looking
                category = CAST_CACHE if is_cast else ACTIVATION
                for part in plain_tensors(value):
                    self.reached.append(Reached(part, category, variable, True, id(node)))  # noqa: FBT003
            elif isinstance(value, StandIn):
                for tensor in value.held(self._stood_for):
                    self._seen.add(id(tensor))
                    self.reached.append(Reached(tensor, ACTIVATION, variable, True, id(node)))  # noqa: FBT003
                self._kept.append(value)
            elif value is not None:
                self._held_by_graph(variable, value, id(node))

    def _held_by_graph(self, variable: Variable, value: Any, graph: int) -> None:
        """What a hook or a function of Python's keeps in a graph."""
        before = len(self.reached)
        self._spread(variable, [value], ACTIVATION)
        for at in range(before, len(self.reached)):
            one = self.reached[at]
            self.reached[at] = Reached(one.tensor, one.category, variable, True, graph)  # noqa: FBT003

    def _leads_to_tensors(self, thing: Any) -> bool:
        """Whether some elements of a large container lead to tensors, three steps on at most."""
        values = list(thing.values()) if isinstance(thing, dict) else list(thing)
        level: list[Any] = [*values[:_TRIED], *values[-_TRIED:]]
        for _ in range(3):
            level = [one for one in level if self._kind(type(one)) != "skip"]
            if any(self._kind(type(one)) == "tensor" for one in level):
                return True
            level = gc.get_referents(*[one for one in level if gc.is_tracked(one)])
        self.is_complete = False
        return False

    def _kind(self, kind: type) -> str:
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _classified(kind)
        return known


def _classified(kind: type) -> str:
    """What objects of a class are to a walk."""
    if issubclass(kind, _NO_WAYS) or module_name(kind).startswith("memfit."):
        return "skip"
    for family, word in _FAMILIES.items():
        if issubclass(kind, family):
            return word
    if owners.is_dataset(kind):
        return DATASET
    if _KV_CLASS.search(kind.__name__):
        return KV_CACHE
    array = _array_class()
    if array is not None and issubclass(kind, array):
        return "array"
    is_plain = module_name(kind) in ("builtins", "collections", "functools")
    return "object" if kind.__flags__ & _HEAP and not is_plain else "container"


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class written in Python, for the most part


def _array_class() -> Any:
    """The class of numpy's arrays, which may be made of a tensor and hold it; ``None`` without."""
    return getattr(sys.modules.get("numpy"), "ndarray", None)


def _holds_array(thing: Any) -> bool:
    """Whether a container that the collector passes by holds an array, as it does not see those."""
    values = thing.values() if type(thing) is dict else thing if type(thing) is tuple else ()
    return _array_class() in map(type, list(values))


def _space(thing: Any) -> dict[Any, Any] | None:
    """The attributes of an object, without asking it."""
    try:
        space = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return space if type(space) is dict else None


def slots_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object has in slots, without asking it."""
    for kind in type(thing).__mro__:
        for name, member in list(vars(kind).items()):
            if type(member) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # nothing was put there
                    yield name, member.__get__(thing, kind)


def closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of others that a function reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents


def _file_of(kind: type) -> str:
    space = space_of(sys.modules.get(module_name(kind)))
    file = space.get("__file__") if space is not None else None
    return file if isinstance(file, str) else "<frozen"


def _is_attention(module: Module) -> bool:
    return bool(_ATTENTION.search(type(module).__name__))


def _is_empty(thing: Any) -> bool:
    return type(thing) in (dict, OrderedDict, list, tuple, set) and not len(thing)


def _is_large(thing: Any) -> bool:
    return type(thing) in (list, dict, tuple, set) and len(thing) > _LARGE
