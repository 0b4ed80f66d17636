"""Frozen dataclasses from plain values (dictionaries, lists, texts, numbers) and back.

Responsible for the answers of the engine (:mod:`memfit.schema`) and for whatever is declared like
them. Not responsible for checking values: they come from the engine.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, dataclass_transform

Read = Callable[[Any], Any]
Record = TypeVar("Record")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(kind: type[Record]) -> type[Record]:
    """Make a class a frozen dataclass with slots, made by keywords alone.

    ``dataclass`` compiles six functions for each class, and there are a hundred in each process;
    records share theirs.

    Args:
        kind: The class.
    """
    made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=True)(kind)
    made.__dataclass_params__.frozen = True  # type: ignore[attr-defined]
    for name, method in vars(_Methods).items():
        if callable(method):
            setattr(made, name, method)
    return made


class _Methods:
    """What all records share."""

    def __init__(self: Any, /, **values: Any) -> None:
        for field in dataclasses.fields(self):
            name = field.name
            if name in values:
                object.__setattr__(self, name, values.pop(name))
            elif field.default is not dataclasses.MISSING:
                object.__setattr__(self, name, field.default)
            else:
                message = f"{type(self).__name__}() lacks the field `{name}`"
                raise TypeError(message)
        if values:
            message = f"{type(self).__name__}() has no field `{next(iter(values))}`"
            raise TypeError(message)

    def __repr__(self) -> str:
        held = (f"{name}={value!r}" for name, value in _held(self).items())
        return f"{type(self).__qualname__}({', '.join(held)})"

    def __eq__(self, other: object) -> Any:
        return _held(self) == _held(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(_held(self).values()))

    def __setattr__(self, name: str, value: object) -> None:
        del self, value
        message = f"cannot assign to field {name!r}"
        raise dataclasses.FrozenInstanceError(message)

    def __delattr__(self, name: str) -> None:
        del self
        message = f"cannot delete field {name!r}"
        raise dataclasses.FrozenInstanceError(message)

    def __getstate__(self) -> dict[str, Any]:
        return _held(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)


def _held(one: Any) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}


def read(kind: type[Record], value: Mapping[str, Any]) -> Record:
    """A record from its plain value; fields that it does not have are ignored.

    Args:
        kind: A dataclass.
        value: Its fields by name.
    """
    make: Read = _reader(kind)  # type: ignore[arg-type]
    record: Record = make(value)
    return record


def plain(value: Any) -> Any:
    """The plain value of a record; fields that may be absent and are are left out."""
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: plain(held)
            for field, held in fields
            if not (held is None and field.default is None)
        }
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return value


@cache
def _reader(kind: Any) -> Read:
    """What makes a value of a type."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            one = _reader(arguments[0])
            return lambda value: tuple(map(one, value))
        each = [_reader(argument) for argument in arguments]
        return lambda value: tuple(make(one) for make, one in zip(each, value, strict=True))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        held = _reader(arguments[1])
        return lambda value: {key: held(one) for key, one in value.items()}
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _dataclass_reader(kind: Any) -> Read:
    types_of = typing.get_type_hints(kind)
    readers = {field.name: _reader(types_of[field.name]) for field in dataclasses.fields(kind)}

    def make(value: Mapping[str, Any]) -> Any:
        named = ((name, one) for name, one in readers.items() if name in value)
        return kind(**{name: one(value[name]) for name, one in named})

    return make


def _union_reader(members: tuple[Any, ...]) -> Read:
    """Reads one of several records by its ``kind``, or one that may be absent."""
    others = [member for member in members if member is not types.NoneType]
    if len(others) == 1:
        make = _reader(others[0])
        return lambda value: None if value is None else make(value)
    by_kind = {
        typing.get_args(typing.get_type_hints(member)["kind"])[0]: _reader(member)
        for member in others
    }
    return lambda value: by_kind[value["kind"]](value)
