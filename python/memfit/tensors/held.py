"""What the functions of a workload hold besides its model and its batch.

Responsible for the tensors that a ``loss`` or ``forward`` reaches by itself: a teacher that a
lambda closes over, a table in a ``partial``, what belongs to the object of a bound method, a global
that its code names. They lie in memory while the step runs, whether it uses all of them or not, so
a recording and a measurement count them, and both ask here. Not responsible for what the rest of
the process holds (:mod:`memfit.track`).
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from memfit.libraries import is_library
from memfit.tensors.barrier import without_barrier
from memfit.tensors.storage import plain_tensors
from memfit.workload import Workload

_NO_WAYS = (
    type(None),
    str,
    bytes,
    int,
    float,
    complex,
    type,
    ModuleType,
    torch.dtype,
    torch.device,
)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_DATA = (torch.optim.Optimizer, DataLoader, Dataset)
"""The step's optimizer is its own; data is read batch by batch."""


def held_tensors(workload: Workload) -> dict[str, Tensor]:
    """Tensors that the functions of a workload hold, by names that lead to them.

    Args:
        workload: The workload; none of its own parameters, buffers and examples are among them.
    """
    walk = _Walk()
    for function in (workload.loss, workload.forward):
        walk.visit("", function)
    with without_barrier():
        own = {key for tensor in _own(workload) for key in _keys(tensor)}
        return {
            name: tensor for name, tensor in walk.found.items() if own.isdisjoint(_keys(tensor))
        }


def _own(workload: Workload) -> Iterator[Tensor]:
    model = workload.model
    leaves = (*model.parameters(), *model.buffers(), *tree_leaves(workload.batch))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _keys(tensor: Tensor) -> set[int]:
    """What tells the memory of a tensor; nothing where it has none."""
    found = set()
    for part in plain_tensors(tensor):
        with suppress(RuntimeError, NotImplementedError):
            found.add(int(part.untyped_storage()._cdata))
    return found


class _Walk:
    """A walk from functions through what they hold; runs no code of theirs."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # numbers tell objects apart only while they live

    def visit(self, name: str, value: Any) -> None:
        """Go from a value, and from what it leads to, in order."""
        level = deque([(name, value)])
        while level:
            name, value = level.popleft()
            # `isinstance` would ask proxies for their class.
            if issubclass(type(value), _NO_WAYS + _DATA) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            if issubclass(type(value), Tensor):
                self.found.setdefault(name or "tensor", value)
            else:
                level.extend(_ways(name, value))


def _ways(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Where a value leads, with names."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        yield from _of_module(name, value)
        return
    if issubclass(kind, partial):
        yield from ((name, part) for part in (value.func, value.args, value.keywords))
    elif issubclass(kind, MethodType):
        yield from ((name, part) for part in (value.__func__, value.__self__))
    elif issubclass(kind, FunctionType):
        yield from _of_function(value)
    else:
        yield from ((_joined(name, key), item) for key, item in _elements(kind, value))
    yield from ((_joined(name, key), item) for key, item in _attributes(value))


def _of_module(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for part, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield _joined(name, part), tensor
    for path, inner in module.named_modules():
        yield from ((_joined(name, path), other) for other in _plain_attributes(inner))


def _elements(kind: type, value: Any) -> Iterator[tuple[object, Any]]:
    """What a container of Python's has, whatever its class makes of being asked."""
    if issubclass(kind, dict):
        yield from list(dict.items(value))
    for sequence in _SEQUENCES:
        if issubclass(kind, sequence):
            yield from enumerate(list(sequence.__iter__(value)))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, its defaults, and the globals that its code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    yield "default", function.__defaults__
    yield "default", function.__kwdefaults__
    if not is_library(function.__code__.co_filename):
        known = function.__globals__
        yield from ((name, known[name]) for name in _globals(function.__code__) if name in known)


def _globals(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _plain_attributes(module: nn.Module) -> Iterator[Any]:
    """What a module has that is no parameter, buffer or module."""
    apart = ("_parameters", "_buffers", "_modules")
    yield from (value for name, value in list(vars(module).items()) if name not in apart)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of a class has, without asking it."""
    with suppress(AttributeError):
        yield from list(object.__getattribute__(value, "__dict__").items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(slot)
            if type(member).__name__ == "member_descriptor":
                with suppress(AttributeError):  # not set
                    yield slot, member.__get__(value)  # type: ignore[union-attr]


def _joined(name: str, part: object) -> str:
    return f"{name}.{part}".strip(".")
