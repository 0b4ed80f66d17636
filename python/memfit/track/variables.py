"""The variables of the program: of its frames and of its modules.

Responsible for finding them, with the names that a person knows them by, without keeping anything
alive. Not responsible for what is reached from them (:mod:`memfit.track.reach`).
"""

from __future__ import annotations

import contextvars
import functools
import opcode
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from memfit.libraries import PACKAGE, is_library

_TORCH = str(Path(torch.__file__).parent) + "/"
_OF_OPTIMIZERS = _TORCH + "optim/"
_OF_STEPS = _OF_OPTIMIZERS + "optimizer.py"
_OF_BACKWARDS = PACKAGE + "track/backwards.py"
_OPTIMIZED = 1  # CO_OPTIMIZED: the variables are not in a dictionary
_OWN_REFERENCES = 3  # the frame's, that of `_emptied` and that of `getrefcount`'s argument


class Variable(NamedTuple):
    """A variable, or an attribute of what one holds.

    Attributes:
        name: As in the source, ``trainer.losses``; empty where a value has none yet.
        file: Name of the file.
        scope: Name of the function; empty for a module's own.
        line: Where the function was when it was looked at; 0 where it is not running.
    """

    name: str
    file: str
    scope: str
    line: int

    @property
    def place(self) -> str:
        """``train.py:12``."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def text(self) -> str:
        """For a person."""
        return f"`{self.name}` ({self.place})" if self.name else f"a value of {self.place}"

    def of(self, attribute: str) -> Variable:
        """An attribute of what it holds."""
        return Variable(f"{self.name}.{attribute}", self.file, self.scope, self.line)


def is_memfit(frame: FrameType) -> bool:
    """Whether a frame runs code of memfit."""
    return frame.f_code.co_filename.startswith(PACKAGE)


Running = tuple[FrameType, int]
"""A frame and the line that it is at."""


def frames(more: Sequence[Running] = ()) -> list[Running]:
    """The frames of the program, the outermost of each thread first, without memfit's own.

    A list and no generator: one that holds its own frame would live on, and all it refers to.

    Args:
        more: Frames that may run no more, such as those of an exception.
    """
    found: dict[int, Running] = {}
    this = threading.get_ident()
    running = {**sys._current_frames(), this: sys._getframe(1)}
    for thread in sorted(running, key=lambda thread: thread != this):
        stack = []
        frame: FrameType | None = running[thread]
        while frame is not None:
            if not is_memfit(frame):
                stack.append((frame, frame.f_lineno or 0))
            frame = frame.f_back
        found.update((id(frame), (frame, line)) for frame, line in reversed(stack))
    # Where an exception passes through, a frame is at the line that raised it.
    found.update((id(frame), (frame, line)) for frame, line in more if not is_memfit(frame))
    return list(found.values())


def of_frames(
    running: Sequence[Running], callers: Sequence[Running] = ()
) -> Iterator[tuple[Variable, Any]]:
    """The local variables of functions: first those of the program, then those of libraries.

    Those of torch's own functions have names that say nothing to anybody: they are values of the
    line of the program or of another library that has called them.

    Args:
        running: The functions' frames.
        callers: Others that may have called them.
    """
    # Sorted without a function of its own, which would hold the frames in a cell.
    own = [one for one in running if not is_library(one[0].f_code.co_filename)]
    others = [one for one in running if is_library(one[0].f_code.co_filename)]
    lines = {id(frame): line for frame, line in (*callers, *running)}
    for frame, line in (*own, *others):
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") in sys.modules:
            continue
        caller = _caller(frame, lines) if code.co_filename.startswith(_TORCH) else None
        file = _shown(code.co_filename)
        for name, value in local_variables(frame).items():
            yield caller or Variable(_spoken(name, value), file, code.co_name, line), value


def is_of_optimizer(frame: FrameType) -> bool:
    """Whether a frame runs code of torch's optimizers."""
    return frame.f_code.co_filename.startswith(_OF_OPTIMIZERS)


def of_optimizers(
    running: Sequence[Running], callers: Sequence[Running]
) -> Iterator[tuple[Variable, list[torch.Tensor]]]:
    """Lists of tensors in local variables of optimizers' methods, under the name of their class.

    LBFGS keeps its history there until its step ends.

    Args:
        running: The methods' frames.
        callers: Others that may have called them.
    """
    lines = {id(frame): line for frame, line in (*callers, *running)}
    for frame, _ in running:
        caller, found = _caller(frame, lines), local_variables(frame)
        optimizer = found.get("self")
        if caller is None or not isinstance(optimizer, torch.optim.Optimizer):
            continue
        caller = caller._replace(name=type(optimizer).__name__)
        for value in found.values():
            if isinstance(value, list):
                yield caller, [it for it in value if isinstance(it, torch.Tensor)]


def _caller(frame: FrameType, lines: Mapping[int, int]) -> Variable | None:
    """A value without a name of the line that has called a function of torch's.

    memfit's own frames lie between where it runs an op for the program.

    Args:
        frame: The function's.
        lines: The lines of frames, by number (``id``).

    Returns:
        ``None`` where the function has no caller.
    """
    at: FrameType | None = frame
    while at is not None and (at.f_code.co_filename.startswith(_TORCH) or is_memfit(at)):
        at = at.f_back
    line = lines.get(id(at))
    return None if at is None or line is None else _unnamed(at.f_code, line)


def _unnamed(code: CodeType, line: int, name: str = "") -> Variable:
    scope = "" if code.co_name == "<module>" else code.co_name
    return Variable(name, _shown(code.co_filename), scope, line)


@functools.cache
def _shown(file: str) -> str:
    """A file's name; with its folder's where each package has one of that name."""
    path = Path(file)
    return f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name


def _spoken(name: str, value: Any) -> str:
    """A name that says something: an object's class instead of ``self``."""
    return type(value).__name__ if name == "self" else name


def local_variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function, or what is left of them while a tracer runs.

    Args:
        frame: The function's.
    """
    if sys.version_info < (3, 13) and (sys.gettrace() or sys.getprofile()):
        # Between two events of a tracer a function's variables live in `f_locals` alone, and are
        # taken from there afterwards: emptied, they would be gone.
        return {}
    variables = frame.f_locals
    found = dict(variables)
    # Before Python 3.13 `f_locals` of a function is a copy that the frame keeps, and every value
    # with it, as long as it runs. It is emptied unless the program has it too, from `locals()`.
    if frame.f_code.co_flags & _OPTIMIZED and sys.version_info < (3, 13):
        _empty(variables)
    return found


def _empty(variables: dict[str, Any]) -> None:
    if sys.getrefcount(variables) <= _OWN_REFERENCES + 1:
        variables.clear()


def of_modules(running: Sequence[Running]) -> Iterator[tuple[Variable, Any]]:
    """The global variables of the program's own modules."""
    lines = {id(frame.f_globals): line for frame, line in running if _is_module(frame)}
    for module in MODULES.own():
        space = space_of(sys.modules.get(module))
        if space is None:
            continue
        file, line = str(space.get("__file__")), lines.get(id(space), 0)
        for name, value in list(space.items()):
            if isinstance(name, str) and not name.startswith("__"):
                yield Variable(name, _shown(file), "", line), value


def of_context() -> Iterator[tuple[Variable, Any]]:
    """The context variables of this thread, which no module's variables lead to."""
    for variable, value in contextvars.copy_context().items():
        yield Variable(variable.name, "a context variable", "", 0), value


def _is_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def space_of(module: object) -> dict[str, Any] | None:
    """The global variables of a module; ``None`` where something else stands in for one."""
    if not issubclass(type(module), ModuleType):
        return None
    # A module may answer `__dict__` in a way of its own.
    space = ModuleType.__getattribute__(module, "__dict__")
    return space if type(space) is dict else None


class Modules:
    """The modules of this process, of which new ones are looked at when there are others."""

    def __init__(self) -> None:
        """Know none yet."""
        self._count = 0
        self._known: dict[str, _Module] = {}
        self._own: tuple[str, ...] = ()
        self._spaces: frozenset[int] = frozenset()

    def own(self) -> tuple[str, ...]:
        """Names of the program's own."""
        self._renew()
        return self._own

    def spaces(self) -> frozenset[int]:
        """Numbers (``id``) of the dictionaries of all of them."""
        self._renew()
        return self._spaces

    def _renew(self) -> None:
        if len(sys.modules) == self._count:
            return
        before = self._known
        found = {
            name: known
            if (known := before.get(name)) is not None and known.module() is module
            else _Module.of(module)
            for name, module in list(sys.modules.items())
        }
        self._count, self._known = len(found), found
        self._own = tuple(name for name, known in found.items() if known.is_own)
        self._spaces = frozenset(known.space for known in found.values())


class _Module(NamedTuple):
    """A module, which is not kept alive.

    Attributes:
        module: It, weakly; something that returns ``None`` where another thing stands for one.
        space: Number (``id``) of its dictionary; 0 likewise.
        is_own: Whether it is the program's own.
    """

    module: Callable[[], Any]
    space: int
    is_own: bool

    @staticmethod
    def of(module: object) -> _Module:
        """What is to be known of one."""
        space = space_of(module)
        if space is None:
            return _Module(lambda: None, 0, is_own=False)
        file = space.get("__file__")
        is_own = isinstance(file, str) and not is_library(file)
        return _Module(weakref.ref(module), id(space), is_own)


MODULES = Modules()
"""The modules of this process."""


def here() -> Variable:
    """Where the program is: the innermost line of its own code, and the variable being assigned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_memfit(frame):
        frame = frame.f_back
    name = _stored_name(frame) if frame is not None else ""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame, name = frame.f_back, ""
    if frame is None:
        return Variable("", "the program", "", 0)
    return _unnamed(frame.f_code, frame.f_lineno or 0, name)


def updating() -> FrameType | None:
    """The frame of torch's that runs an optimizer's step, where no code of the program's is in it.

    There is such a one in every optimizer, whoever wrote it. In a closure that a step calls, or in
    an optimizer of the program's own, variables have names that say more.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _OF_STEPS and code.co_name == "wrapper":
            return frame
        if not is_library(code.co_filename):
            return None
        frame = frame.f_back
    return None


def in_backward() -> FrameType | None:
    """The frame that runs a backward, where no code of the program's runs in it.

    Ops of a backward are seen in Python where memfit records or plans a step. In a backward of a
    function of the program's, or in a hook, variables have names that say more.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _OF_BACKWARDS and code.co_name == "run_backward":
            return frame
        if not (is_memfit(frame) or is_library(code.co_filename)):
            return None
        frame = frame.f_back
    return None


def inside(frame: FrameType) -> set[int]:
    """Numbers (``id``) of a frame that runs on this thread and of all that it has called."""
    found = set()
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        found.add(id(at))
        if at is frame:
            return found
        at = at.f_back
    return set()


def _stored_name(frame: FrameType) -> str:
    """The variable that takes what a call has just returned; empty where there is none."""
    code, at = frame.f_code, frame.f_lasti
    instructions = code.co_code
    if at < 0 or not opcode.opname[instructions[at]].startswith("CALL"):
        return ""
    at += 2 * (1 + _cache_entries(instructions[at]))
    if at + 1 >= len(instructions):
        return ""
    operation, argument = opcode.opname[instructions[at]], instructions[at + 1]
    if operation in ("STORE_NAME", "STORE_GLOBAL"):
        return code.co_names[argument]
    is_local = operation == "STORE_FAST" and argument < len(code.co_varnames)
    return code.co_varnames[argument] if is_local else ""


def _cache_entries(operation: int) -> int:
    """How many entries follow an instruction before the next one."""
    entries: Any = getattr(opcode, "_inline_cache_entries", None)
    if isinstance(entries, list):
        return int(entries[operation])
    return int(entries.get(opcode.opname[operation], 0)) if entries is not None else 0
