"""From a target as typed to the function that builds a workload.

Responsible for finding the function, for turning ``--set`` texts into its arguments, and for saying
what is wrong with either. Not responsible for what is done with the workload.

A target is ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``. A file is loaded by its path with
its folder on ``sys.path``, as ``python FILE.py`` would; a module is imported with the working
folder on ``sys.path``, as ``python -m`` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any

from memfit.errors import UsageError, WorkloadError
from memfit.workload import Workload

Settings = Sequence[tuple[str, str]]
"""Names and texts, as ``--set name=value`` gave them."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

_EXTRA_PACKAGES = frozenset({"diffusers", "timm", "torchvision", "transformers"})
"""What ``pip install memfit[examples]`` brings."""


def workload_factory(target: str, settings: Settings) -> Callable[[], Workload]:
    """A function without arguments that builds the target's workload.

    Args:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        settings: Arguments for the function, as texts.

    Returns:
        The factory; each call builds afresh.

    Raises:
        UsageError: The target cannot be found or the settings do not match its parameters.
        WorkloadError: The file or module fails by itself while it is loaded.
    """
    place, _, name = target.rpartition(":")
    module = _load(place)
    function = getattr(module, name, None)
    if function is None:
        error = UsageError(f"`{place}` has no function `{name}`")
        error.add_note(_known("functions", _functions(module)))
        raise error
    if not callable(function):
        message = f"`{name}` in `{place}` is a `{type(function).__name__}`, not a function"
        raise UsageError(message)
    arguments = _arguments(function, name, settings)

    def build() -> Workload:
        return _build(function, arguments, target)

    return build


def _build(function: Callable[..., Any], arguments: dict[str, Any], target: str) -> Workload:
    try:
        workload = function(**arguments)
    except UsageError:
        raise  # `Workload` itself refuses what cannot be a step, in words that need no more
    except ModuleNotFoundError as error:
        _explain_missing(error)
        message = f"`{target}` failed by itself while building"
        raise WorkloadError(message, phase="build") from error
    except Exception as error:
        message = f"`{target}` failed by itself while building"
        raise WorkloadError(message, phase="build") from error
    if not isinstance(workload, Workload):
        message = f"`{target}` returned `{type(workload).__name__}`, not `memfit.Workload`"
        wrong = UsageError(message)
        wrong.add_note("end it with `return memfit.Workload(model=..., batch=...)`")
        raise wrong
    return workload


def _load(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return _import_module(place)
    path = Path(place)
    if not path.is_file():
        raise UsageError(f"there is no file `{place}`")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{place}` cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name.
    before = sys.modules.get(path.stem)
    if before is None:
        sys.modules[path.stem] = module
    try:
        _run_import(lambda: spec.loader.exec_module(module) if spec.loader else None, place)
    except BaseException:
        if before is None:
            del sys.modules[path.stem]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        error = UsageError(f"there is no module `{name}`")
        error.add_note("a file needs its ending: `FILE.py:FUNCTION`")
        raise error
    return _run_import(lambda: importlib.import_module(name), name)


T = typing.TypeVar("T")


def _run_import(load: Callable[[], T], place: str) -> T:
    try:
        return load()
    except ModuleNotFoundError as error:
        _explain_missing(error)
        raise WorkloadError(f"`{place}` failed by itself on import", phase="build") from error
    except Exception as error:
        raise WorkloadError(f"`{place}` failed by itself on import", phase="build") from error


def _explain_missing(error: ModuleNotFoundError) -> None:
    """Raise a usage error when a package that an example needs is not installed."""
    package = (error.name or "").partition(".")[0]
    if package in _EXTRA_PACKAGES:
        missing = UsageError(f"the target needs the package `{package}`, which is not installed")
        missing.add_note("install it with `pip install memfit[examples]`")
        raise missing from error


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _known(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"it has no {what}"
    return f"its {what} are {', '.join(f'`{name}`' for name in names)}"


def _arguments(function: Callable[..., Any], name: str, settings: Settings) -> dict[str, Any]:
    """The function's keyword arguments, read by annotation or default value."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    by_name = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind
        in {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    }
    arguments: dict[str, Any] = {}
    for key, text in settings:
        if key not in by_name and not takes_any:
            error = UsageError(f"`{name}` has no parameter `{key}`")
            error.add_note(_known("parameters", list(by_name)))
            raise error
        parameter = by_name.get(key)
        kinds = _kinds(function, parameter) if parameter else (str,)
        arguments[key] = _read(key, text, kinds)
    needed = [
        key
        for key, parameter in by_name.items()
        if parameter.default is inspect.Parameter.empty and key not in arguments
    ]
    if needed:
        error = UsageError(f"`{name}` needs a value for {', '.join(f'`{key}`' for key in needed)}")
        error.add_note(f"give it with `--set {needed[0]}=VALUE`")
        raise error
    return arguments


def _kinds(function: Callable[..., Any], parameter: inspect.Parameter) -> tuple[type, ...]:
    """The types a parameter takes, in the order they are tried."""
    try:
        annotation = typing.get_type_hints(function).get(parameter.name)
    except (NameError, TypeError):
        annotation = None
    if annotation is None:
        default = parameter.default
        known = default is not None and default is not inspect.Parameter.empty
        return (type(default),) if known else (str,)
    if isinstance(annotation, UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(typing.get_args(annotation))
    return (annotation,)


def _read(name: str, text: str, kinds: tuple[type, ...]) -> bool | int | float | str | None:
    for kind in sorted(kinds, key=_order):
        try:
            return _read_as(text, kind)
        except ValueError:
            continue
    expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    message = f"cannot read `{text}` as the value of `{name}`: expected {expected}"
    error = UsageError(message)
    if not any(kind in _READABLE for kind in kinds):
        error.add_note("`--set` can give bool, int, float, str and None")
    raise error


_READABLE = (NoneType, bool, int, float, str)


def _order(kind: type) -> int:
    """Narrow types first, so that ``int | str`` reads ``3`` as a number."""
    return _READABLE.index(kind) if kind in _READABLE else len(_READABLE)


def _read_as(text: str, kind: type) -> bool | int | float | str | None:
    word = text.strip().lower()
    if kind is NoneType and word == "none":
        return None
    if kind is bool and word in _TRUE | _FALSE:
        return word in _TRUE
    if kind is int:
        return int(text)
    if kind is float:
        return float(text)
    if kind is str:
        return text
    raise ValueError(text)
