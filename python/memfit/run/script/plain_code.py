"""Whether a model's code can do anything besides computing, as far as its instructions tell.

Responsible for that question, before any of the code runs: a proof runs a model's forward on fakes,
and pieces of a batch run it several times, so what it does outside the model would happen more
often than without memfit. Not responsible for what a call really did
(:mod:`memfit.capture.record.effects`).

Code of libraries is taken to compute. The script's own does where it uses nothing from outside but
torch, ``math``, constants, and functions of which the same holds. What a module holds is copied for
a proof, which shows whether the code changes that.
"""

from __future__ import annotations

import argparse
import builtins
import dis
import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import zip_longest
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn

from memfit.libraries import is_library, module_name

_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "frozenset"),
        *("getattr", "hasattr", "int", "isinstance", "issubclass", "iter", "len", "list", "map"),
        *("max", "min", "next", "pow", "range", "reversed", "round", "set", "slice", "sorted"),
        *("str", "sum", "super", "tuple", "zip"),
    }
)
"""Functions of Python that only compute."""

_REACHING_OUT = frozenset({"DELETE_GLOBAL", "IMPORT_FROM", "IMPORT_NAME", "STORE_GLOBAL"})
"""Instructions that change or fetch what is not the function's own."""

_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})

_KEEPING = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"})

_ADDING = frozenset(
    {
        *("append", "extend", "insert", "pop", "popitem", "register_buffer", "register_hook"),
        *("retain_grad", "setdefault", "update"),
    }
)
"""Methods that change what they are called on, or have something happen later."""

_NAMES = frozenset(
    {
        *("__class__", "__dict__", "__globals__", "distributed", "hub", "manual_seed"),
        *("multiprocessing", "save", "seed"),
    }
)
"""Attributes that lead out of what is copied, or do something besides."""

_OF_ALL = frozenset(vars(nn.Module()))
"""What every module holds; modules inside it are looked at by themselves."""

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HELD = (*_CONSTANTS, Tensor, nn.Module, torch.Size)


def more_than_computing(model: nn.Module) -> str:
    """What the code of a model may do besides computing, as a clause; empty where it only computes.

    Args:
        model: The model.
    """
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "all modules have forward hooks"
    known: set[CodeType] = set()
    for module in model.modules():
        name = type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks:
            return f"a `{name}` has a forward hook"
        if "forward" in vars(module):
            return f"a `{name}` has a `forward` of its own"
        for kind in filter(_is_own, type(module).__mro__):
            held = ((at, it) for at, it in vars(module).items() if at not in _OF_ALL)
            outside = next((at for at, it in held if not _is_copied(it)), "")
            reasons = (_reason(function, known) for function in _methods(kind))
            reason = _unknown("holds", outside) if outside else next(filter(None, reasons), "")
            if reason:
                return f"`{name}` {reason}"
    return ""


def keeps_from_calls(model: nn.Module) -> str:
    """What the script's own code in a model may keep from a call, as a clause; empty for nothing.

    What runs several times for one call would keep each part.

    Args:
        model: The model.
    """
    for module in model.modules():
        for kind in filter(_is_own, type(module).__mro__):
            codes = (getattr(it, "__code__", None) for it in _methods(kind))
            if any(code is not None and _keeps(code) for code in codes):
                return f"`{type(module).__name__}` keeps something from a call"
    return ""


def _keeps(code: CodeType) -> bool:
    """Whether code sets attributes or entries, or adds to a list."""
    if is_library(code.co_filename):
        return False
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(
        it.opname in _KEEPING or (it.opname in _ATTRIBUTES and str(it.argval) in _ADDING)
        for it in dis.get_instructions(code)
    ) or any(map(_keeps, inner))


def _is_own(kind: type) -> bool:
    """Whether a class is the script's own."""
    functions = (value for value in vars(kind).values() if isinstance(value, FunctionType))
    return any(not is_library(function.__code__.co_filename) for function in functions)


def _methods(kind: type) -> Iterator[Any]:
    """What of a class's own may run in a call."""
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType) and name != "__init__":
            yield getattr(value, "__wrapped__", value)
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, property):
            yield value.fget


def _is_copied(value: Any) -> bool:
    """Whether a value is no way out of a copy of what holds it."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_copied, value))
    if isinstance(value, dict):
        return all(map(_is_copied, value.values()))
    if _is_record(type(value)):
        return all(isinstance(it, (*_CONSTANTS, torch.Size)) for it in vars(value).values())
    return isinstance(value, _HELD) or _is_torchs(value)


def _is_record(kind: type) -> bool:
    """Whether a class does nothing but hold values by name, as configurations do."""
    if kind in {SimpleNamespace, argparse.Namespace}:
        return True
    if not is_dataclass(kind) or not getattr(kind, "__dictoffset__", 0):
        return False
    held = (value for base in kind.__mro__[:-1] for value in vars(base).values())
    return all(map(_is_made_by_python, held))


def _is_made_by_python(value: Any) -> bool:
    """Whether something in a class is a constant, or what Python puts there by itself."""
    if isinstance(value, FunctionType):
        place = value.__code__.co_filename
        return place == "<string>" or is_library(place)
    return isinstance(value, GetSetDescriptorType) or not hasattr(type(value), "__get__")


def _reason(function: Any, known: set[CodeType]) -> str:
    """What a function may do besides computing with what it was given; empty for nothing."""
    if not isinstance(function, FunctionType):
        return _unknown("uses", repr(function))
    code = function.__code__
    if is_library(code.co_filename) or code in known:
        return ""
    known.add(code)
    outer = next(iter(set(code.co_freevars) - {"__class__"}), "")
    if outer:
        return _unknown("uses", outer)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(isinstance(value, (*_CONSTANTS, tuple)) for value in defaults):
        return f"keeps something between calls of `{function.__name__}`"
    return _reason_of_code(code, function.__globals__, known)


def _reason_of_code(code: CodeType, names: dict[str, Any], known: set[CodeType]) -> str:
    before = ""
    instructions = list(dis.get_instructions(code))
    for instruction, after in zip_longest(instructions, instructions[1:]):
        operation, name = instruction.opname, str(instruction.argval)
        if operation in _REACHING_OUT or (operation in _ATTRIBUTES and _leads_out(name)):
            return _unknown("uses", name)
        if operation == "STORE_ATTR" and not before.startswith("LOAD_FAST"):
            return f"sets `{name}`"
        if operation in {"LOAD_GLOBAL", "LOAD_NAME"} and not _is_plain(name, names, known):
            read = after.argval if after is not None and after.opname == "LOAD_ATTR" else ""
            if not _is_setting(names.get(name), read):
                return _unknown("uses", name)
        before = operation
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return next(filter(None, (_reason_of_code(one, names, known) for one in inner)), "")


def _unknown(how: str, name: str) -> str:
    return f"{how} `{name}`, and what that does besides computing is not known"


def _leads_out(name: str) -> bool:
    return name in _NAMES or name.startswith("set_")


def _is_plain(name: str, names: dict[str, Any], known: set[CodeType]) -> bool:
    """Whether what a global name stands for only computes."""
    if name not in names:
        kind = getattr(builtins, name, None)
        is_error = isinstance(kind, type) and issubclass(kind, BaseException)
        return name in _BUILTINS or is_error
    value = names[name]
    if isinstance(value, ModuleType):
        return value is math or value.__name__.partition(".")[0] == "torch"
    if isinstance(value, tuple):
        return all(isinstance(item, _CONSTANTS) for item in value)
    is_own = isinstance(value, FunctionType) and not is_library(value.__code__.co_filename)
    return (
        (is_own and not _reason(value, known)) or isinstance(value, _CONSTANTS) or _is_torchs(value)
    )


def _is_setting(record: Any, name: str) -> bool:
    """Whether what is read of a global record, as of a script's options, is a constant."""
    held = vars(record).get(name, record) if _is_record(type(record)) else record
    constants = held if isinstance(held, tuple) else (held,)
    return held is not record and all(isinstance(it, (*_CONSTANTS, torch.Size)) for it in constants)


def _is_torchs(value: Any) -> bool:
    """Whether something is a function or class of torch's, or of ``math``, that only computes."""
    if not isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return False
    from_where = module_name(value).partition(".")[0]
    return from_where in {"torch", "math"} and not _leads_out(value.__name__)
