"""Whether a script calls its optimizer right after backward, whatever happens.

Responsible for the proof from the script's own code: both calls stand in one function, and between
them nothing runs that could look at a gradient, or not reach the step. Not responsible for what
follows from it (:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

import dis
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch

from memfit.libraries import PACKAGE, is_library

_LOOKS_ON = (str(Path(torch.__file__).parent) + "/", PACKAGE)
"""Packages whose frames lie between the script and what it calls."""

_NOTHING_RUNS = {
    "CACHE",
    "COPY",
    "EXTENDED_ARG",
    "LOAD_ATTR",
    "LOAD_CONST",
    "LOAD_DEREF",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_CHECK",
    "LOAD_GLOBAL",
    "LOAD_METHOD",
    "LOAD_NAME",
    "NOP",
    "POP_TOP",
    "PRECALL",
    "PUSH_NULL",
}
"""Instructions that lead from one call to the next without running anything or branching."""

_GRADIENTS = re.compile(r"\.grad\b|\bclip_grad|\bunscale_|\bget_total_norm|_grads?_norm")
"""Words of code that looks at gradients."""


@dataclass(frozen=True, slots=True)
class Site:
    """A call in the script's own code.

    Attributes:
        frame: Which frame made it, as a number: frames themselves keep what they hold alive.
        code: Its code.
        position: The instruction.
    """

    frame: int
    code: CodeType
    position: int


def calling_site() -> Site | None:
    """The call that led here, in code that is neither torch's nor memfit's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LOOKS_ON):
            return Site(id(frame), frame.f_code, frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def adjacent_refusal(backward: Site | None, step: Site | None) -> str:
    """Why a step may not follow at once on its backward; empty where it always does.

    Args:
        backward: Where backward was called.
        step: Where the optimizer was.
    """
    if backward is None or step is None or backward.code is not step.code:
        return "backward and the optimizer are called in different functions"
    if backward.frame != step.frame or backward.position >= step.position:
        return "the optimizer is not called after backward"
    # A position may lie in the room behind the instruction that it is of.
    until = [it for it in dis.get_instructions(backward.code) if it.offset <= step.position][:-1]
    between = [it for it in until if it.offset > backward.position]
    if all(instruction.opname in _NOTHING_RUNS for instruction in between):
        return ""
    return "something runs between backward and the optimizer"


def gradients_looked_at() -> str:
    """Where the script's own files speak of gradients, as a clause; empty where none does."""
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        if is_library(name) or name.startswith(_LOOKS_ON):
            continue
        if not Path(name).is_file():
            continue  # torch gives some of its own modules names of files that are none
        text = Path(name).read_text(encoding="utf-8", errors="replace")
        found = _GRADIENTS.search(text)
        if found is not None:
            line = text.count("\n", 0, found.start()) + 1
            return f"gradients are looked at in `{Path(name).name}:{line}`"
    return ""
