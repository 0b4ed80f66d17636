"""Torch's stack of function modes, when one is to go that may not lie on top.

Responsible for taking off one mode. Not responsible for what modes do.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


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
