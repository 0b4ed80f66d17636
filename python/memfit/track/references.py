"""Who refers to a tensor: objects and variables of Python, or something that neither can show.

An array of numpy has the address of a tensor's memory and holds the tensor, and no garbage
collector sees that. So what has more references than the collector and the running functions
account for may not be given other memory. Responsible for that count. Not responsible for tensors
that C++ holds: graphs, views and capsules of ``dlpack`` (:mod:`memfit.tensors.storage`).
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from memfit.track.variables import MODULES, local_variables, space_of

_MANY = 64
"""From so many tensors on, all objects are looked at once instead of each for all tensors."""

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Functions that are objects of the collector's: it may know of their variables already."""


def held_by_python_alone(tensors: list[Tensor]) -> list[Tensor]:
    """Those of some tensors to which nothing but objects and variables of Python refers.

    It takes some 30 to 300 ms.

    Args:
        tensors: They.
    """
    keys = set(map(id, tensors))
    known = Counter(filter(keys.__contains__, _ids_of_variables()))
    holders = gc.get_referrers(*tensors) if len(tensors) < _MANY else gc.get_objects()
    known.update(filter(keys.__contains__, map(id, gc.get_referents(*holders))))
    seen = set(map(id, holders))
    del holders  # tensors may be among them
    frozen = [space for space in _spaces() if id(space) not in seen]
    known.update(
        id(value) for space in frozen for value in list(space.values()) if id(value) in keys
    )
    # The loop and the call of `getrefcount` refer to a tensor as they do to any object.
    (of_loop,) = [sys.getrefcount(it) - 1 for it in [object()]]
    return [it for it in tensors if sys.getrefcount(it) - of_loop <= known[id(it)]]


def _spaces() -> list[dict[str, Any]]:
    """The global variables of the program's modules, which the collector may have frozen."""
    spaces = (space_of(sys.modules.get(module)) for module in MODULES.own())
    return list({id(space): space for space in spaces if space is not None}.values())


def _ids_of_variables() -> Iterator[int]:
    """The ``id`` of what each variable of a running function refers to."""
    frames = sys._current_frames() | {threading.get_ident(): sys._getframe(1)}
    for frame in frames.values():
        at: FrameType | None = frame
        while at is not None:
            yield from _ids_of_function(at)
            at = at.f_back


def _ids_of_function(frame: FrameType) -> list[int]:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or code.co_flags & _SUSPENDED:
        return []
    values = local_variables(frame)
    # What an inner function uses is in a cell, of which the collector knows.
    names = set(code.co_varnames).difference(code.co_cellvars)
    return [id(value) for name, value in values.items() if name in names]
