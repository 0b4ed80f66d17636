"""Setting up PyTorch's caching allocator.

Responsible for the action ``allocator_settings``: free memory that lies in pieces is of use again.
Not responsible for choosing the settings (the engine simulates them).
"""

from __future__ import annotations

import os

import torch

from memfit.errors import UsageError

EXPANDABLE = "expandable_segments:True"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def keep_in_one_piece() -> None:
    """Let segments grow, where the user has chosen no settings.

    A step by a plan asks for other sizes than the one before; without this the allocator keeps
    room for both: ResNet-50 held 4.2 GiB of an H200 for 2.3 GiB of tensors, and 2.2 GiB for 2.1 so.
    """
    if torch.version.cuda and not any(os.environ.get(name) for name in _VARIABLES):
        set_up(EXPANDABLE)


def set_up(settings: str) -> None:
    """Change the settings of this process's CUDA caching allocator.

    Blocks handed out before stay where they are; segments taken from here on follow the settings.

    Args:
        settings: As in ``PYTORCH_CUDA_ALLOC_CONF``, ``expandable_segments:True`` say.

    Raises:
        UsageError: PyTorch refuses the settings.
    """
    try:
        # What `torch.cuda.memory._set_allocator_settings` calls; there is no public way.
        torch._C._accelerator_setAllocatorSettings(settings)
    except (RuntimeError, ValueError) as error:
        message = f"PyTorch refuses the allocator settings `{settings}`: {error}"
        raise UsageError(message) from error
