"""Setting up PyTorch's caching allocator.

Responsible for the action ``allocator_settings``: free memory that lies in pieces is of use again.
Not responsible for choosing the settings (the engine simulates them).
"""

from __future__ import annotations

import torch

from memfit.errors import UsageError


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
