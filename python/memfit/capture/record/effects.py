"""What a function does besides returning something, as far as can be seen.

Responsible for what a function can reach and may change (modules, tensors, containers, numbers,
random generators) and for what it prints. Not responsible for what follows from it
(:mod:`memfit.run.script.checkpoints`, :mod:`memfit.capture.record.model_checkpoints`): what happens
in a checkpoint's body happens twice.

Two looks at the same things are compared, one from before a call and one from after it. The code of
installed packages is taken to change nothing but the modules and objects that it is given.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memfit.libraries import module_name
from memfit.tensors.storage import graph_of

MOST_REACHED = 20_000
"""Things looked at behind one function; one that reaches more is taken to do anything."""

_LONGEST = 256
"""Longest container whose items are looked at; of longer ones the length is."""

_SMALL_BYTES = 1 << 16
"""Up to this size the bytes of a tensor are compared: some kernels write without a trace."""

_HOLDERS = (nn.Module, SimpleNamespace, argparse.Namespace)
"""Objects of torch's and Python's own classes that a script keeps things in."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SHOWS = frozenset({"print", "write", "writelines", "system", "send", "sendall"})
"""Names of built-in functions whose call shows outside the process."""

_TORCH_OR_OLDER = frozenset(sys.stdlib_module_names | {"torch", "memfit", "numpy", "builtins"})

_MEMFIT = str(Path(__file__).parents[2]) + "/"
_AROUND = (
    "run/script/signals.py",
    "record/checkpoints.py",
    "script/launcher.py",
    "capture/record/step.py",
    "plan/alternatives.py",
    "memfit/distillation.py",
)

Fact = tuple[Any, ...]


class Look:
    """What a function reaches, as it is now.

    Attributes:
        graphs: Whether a tensor that it reaches, and is not given, belongs to a graph.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        """Look.

        Args:
            function: The function.
            arguments: What it is called with; what is written to these tensors counts as well.
        """
        self.graphs = False
        self._facts: dict[Fact, Any] = {("random",): random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state()
            self._facts["random",] = (random.getstate(), state[1].tobytes(), state[2:])
        self._reached: dict[int, Any] = {}
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._facts.update({("tensor", id(tensor)): _content(tensor) for tensor in given})
        self._reached.update({id(tensor): tensor for tensor in given})
        to_come: list[Any] = [function, *tree_leaves(arguments)]
        while to_come and len(self._reached) <= MOST_REACHED:
            thing = to_come.pop()
            if id(thing) not in self._reached:
                self._reached[id(thing)] = thing
                to_come.extend(self._look_at(thing))
        self._overflows = bool(to_come)

    def tensors(self) -> list[tuple[Tensor, int]]:
        """The tensors reached that are no parameters, with their versions."""
        return [
            (thing, _version(thing))
            for thing in self._reached.values()
            if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter)
        ]

    def difference(self, later: Look) -> str:
        """What a later look at the same function shows to have changed, as a clause."""
        if self._overflows or later._overflows:
            return "it reaches more than can be looked at"
        for key, fact in later._facts.items():
            # What was made on the way may be new; what is there no more was replaced.
            if key in self._facts and self._facts[key] != fact:
                return _changed(key, later._reached.get(key[-1]))
        return ""

    def _look_at(self, thing: Any) -> Iterator[Any]:
        """Note facts about something; yields what to look at next."""
        if isinstance(thing, Tensor):
            self._facts["tensor", id(thing)] = _content(thing)
            self.graphs = self.graphs or graph_of(thing) is not None
            return
        if isinstance(thing, (deque, bytearray, itertools.count)):
            self._facts["length", id(thing)] = (
                repr(thing) if isinstance(thing, itertools.count) else len(thing)
            )
            return
        count = 0
        for name, value in _parts(thing):
            count += 1
            plain = isinstance(value, _PLAIN)
            self._facts[name, id(thing)] = value if plain else id(value)
            if not plain:
                yield value
        self._facts["length", id(thing)] = (
            len(thing) if isinstance(thing, (dict, list, set)) else count
        )


class Shows:
    """Whether this thread calls, while it is watched, what shows outside the process."""

    def __init__(self) -> None:
        """Watch, where no profiler does."""
        self.found = ""
        self._watches = sys.getprofile() is None
        if self._watches:
            sys.setprofile(self._called)
        else:
            self.found = "a profiler runs, so it is not known what it prints"

    def end(self) -> None:
        """Watch no more."""
        if self._watches and sys.getprofile() == self._called:
            sys.setprofile(None)

    def _called(self, frame: Any, event: str, called: Any) -> None:
        # Called at every call and return of torch and memfit too: most end at the first look.
        if event != "c_call" or called.__name__ not in _SHOWS:
            return
        while frame is not None and not frame.f_code.co_filename.startswith(_MEMFIT):
            frame = frame.f_back
        # Of memfit, those stand around the function; all others were called by what runs in it.
        if frame is None or frame.f_code.co_filename.endswith(_AROUND):
            self.found = f"it calls `{called.__name__}`"


class CallLook:
    """What one call of a model does besides computing."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        """Look; the call is about to begin.

        Args:
            model: The model.
            inputs: What it is called with.
        """
        code = {type(module).forward: None for module in model.modules()}
        self._reaches = functools.partial(model.forward, *code)
        self._inputs = inputs
        self._before = Look(self._reaches, inputs)
        self._shows = Shows()

    def end(self) -> str:
        """The call has ended; what it did, as a clause, empty for nothing."""
        self._shows.end()
        return self._shows.found or self._before.difference(Look(self._reaches, self._inputs))


def modules_behind(function: Callable[..., Any], arguments: Any) -> list[nn.Module]:
    """The modules that a function holds or is given, those inside them among them.

    Args:
        function: The function.
        arguments: What it is called with.
    """
    found: dict[nn.Module, None] = {}
    to_come: list[Any] = [function, *tree_leaves(arguments)]
    while to_come:
        thing = to_come.pop()
        if isinstance(thing, nn.Module):
            found.update(dict.fromkeys(thing.modules()))
        elif isinstance(thing, (list, tuple)):
            to_come += thing[:_LONGEST]
        elif isinstance(thing, (FunctionType, MethodType, functools.partial)):
            to_come += _held(thing)
    return list(found)


def _parts(thing: Any) -> Iterator[tuple[Any, Any]]:
    """What something consists of, by name."""
    if isinstance(thing, (FunctionType, MethodType, functools.partial)):
        yield from enumerate(_held(thing))
        if isinstance(thing, FunctionType) and not _is_installed(module_name(thing)):
            yield from ((name, thing.__globals__.get(name)) for name in _names(thing.__code__))
    elif isinstance(thing, dict):
        if len(thing) <= _LONGEST:
            yield from (
                (name if isinstance(name, _PLAIN) else id(name), v) for name, v in thing.items()
            )
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from enumerate(thing if len(thing) <= _LONGEST else ())
    elif isinstance(thing, type):
        if not _is_installed(module_name(thing)):
            yield from vars(thing).items()
            yield from enumerate(thing.__bases__)
    elif isinstance(thing, _HOLDERS) or not _is_of_torch_or_older(module_name(type(thing))):
        yield "class", type(thing)
        yield from getattr(thing, "__dict__", {}).items()


def _held(function: Any) -> list[Any]:
    """What a function holds itself."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    held = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    return held


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """Names of globals that a function may use, those of functions inside it among them."""
    inside = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inside)))


def _is_of_torch_or_older(module: str) -> bool:
    return module.split(".", 1)[0] in _TORCH_OR_OLDER


def _is_installed(module: str) -> bool:
    """Whether code is of a package that is installed, and not of the script."""
    if _is_of_torch_or_older(module):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "-packages/" in file


def _others_random_state() -> Any:
    """State of Python's random generator and of numpy's, where that is loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    state = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _content(tensor: Tensor) -> Fact:
    """What tells a tensor's content, but for writes to large ones that leave no trace."""
    version = _version(tensor)
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or not 0 < tensor.nbytes <= _SMALL_BYTES
        or not tensor.is_contiguous()
    ):
        return (version,)
    return version, hash(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def _changed(key: Fact, thing: Any) -> str:
    if key[0] == "random":
        return "it draws random numbers that are not torch's"
    if key[0] == "tensor":
        return f"it writes to a tensor of shape {list(thing.shape)}"
    what = f"`{key[0]}`" if isinstance(key[0], str) and key[0] != "length" else "what is in"
    return f"it changes {what} of a `{type(thing).__name__}`"
