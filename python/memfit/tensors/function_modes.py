"""Torch's stack of function modes, beneath and among those of a script.

Responsible for putting on a mode and taking it off whatever else is there, and for telling torch's
own function from what a script has put in its place. Not responsible for what modes do.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from memfit.libraries import module_name

_OWN = {name: it for name, it in vars(F).items() if isinstance(it, FunctionType)}
_OWN_FUNCTIONS = frozenset(_OWN.values())


def torchs_own(func: Any) -> Any:
    """The function that torch announces to a mode, itself.

    It looks itself up by its name; a wrapper that a script has put there would run twice.

    Args:
        func: What the mode is given.
    """
    if not isinstance(func, FunctionType) or func in _OWN_FUNCTIONS:
        return func
    return next((own for name, own in _OWN.items() if getattr(F, name, None) is func), func)


def function_mode() -> str | None:
    """Why a forward must not run in pieces: a mode of the program's own would see each.

    That of a device, which only fills in where tensors are made, does not count.
    """
    stack = range(torch._C._len_torch_function_stack())
    modes = (torch._C._get_function_stack_at(place) for place in stack)
    others = (it for it in modes if not isinstance(it, DeviceContext))
    seeing = (it for it in others if not module_name(type(it)).startswith(("memfit.", "torch.")))
    found = next(seeing, None)
    return (
        f"`{type(found).__name__}` is a function mode, which would see each piece"
        if found
        else None
    )


def put_beneath(mode: TorchFunctionMode) -> None:
    """Enter a function mode beneath all others: who leaves one takes off what lies on top.

    Args:
        mode: The mode.
    """
    above = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        above.append(top)
        if isinstance(top, DeviceContext):  # torch wants that at the bottom
            torch._C._push_on_torch_function_stack(above.pop())
            break
    for other in (mode, *reversed(above)):
        torch._C._push_on_torch_function_stack(other)


def take_off(mode: TorchFunctionMode) -> bool:
    """Leave a function mode, whatever was entered since.

    Inside a call that a mode handles, torch has it off the stack and puts it back afterwards.

    Args:
        mode: The mode.

    Returns:
        Whether it was there.
    """
    above = []
    found = False
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        found = top is mode
        if found:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)
    return found
