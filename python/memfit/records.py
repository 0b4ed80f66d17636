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
from typing import Any, TypeVar

Read = Callable[[Any], Any]
Record = TypeVar("Record")


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
